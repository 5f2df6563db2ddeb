"""The settings section of service/README.md is up to date."""

import dataclasses

from service.config.settings import Settings
from tests.support.settings_table import PAGE, settings_section


def test_the_section_is_up_to_date():
    text = PAGE.read_text()
    assert text.endswith(settings_section()), "python -m tests.support.settings_table"
    for field in dataclasses.fields(Settings):
        assert f"| `--{field.name.replace('_', '-')}` |" in text
