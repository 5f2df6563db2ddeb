"""The table of settings for people is the page of settings, as it stands."""

import dataclasses

from service.config.settings import Settings
from tests.support.settings_table import settings_page
from tests.support.source_tree import ROOT


def test_the_table_is_up_to_date():
    told = (ROOT / "service" / "README.md").read_text()
    assert told == settings_page(), "python -m tests.support.settings_table > service/README.md"
    for field in dataclasses.fields(Settings):
        assert f"| `--{field.name.replace('_', '-')}` |" in told
