"""Each verb loads, and no more than it needs."""

import subprocess
import sys

import pytest

from service.cli.verbs import COMPLETION, HELP, WITH_SETTINGS, WITHOUT_SETTINGS, load_plain_verb, load_verb
from service.config.settings import VERBS
from tests.support.source_tree import ROOT


def test_the_verbs_with_settings_match_the_settings():
    assert tuple(WITH_SETTINGS) == VERBS


def test_each_verb_has_its_own_command():
    runs = [load_verb(verb).run for verb in WITH_SETTINGS]
    runs += [load_plain_verb(verb).run for verb in WITHOUT_SETTINGS if verb != COMPLETION]
    assert len({run.__name__ for run in runs}) == len(HELP) - 1


@pytest.mark.parametrize(
    ("verb", "unneeded"),
    [
        ("serve", {"numpy", "aiohttp", "service.engine", "service.bench"}),
        ("gateway", {"service.engine", "service.worker", "service.bench"}),
        ("worker", {"aiohttp", "jinja2", "service.gateway", "service.bench"}),
    ],
)
def test_a_process_of_the_service_imports_only_what_it_runs(verb, unneeded):
    program = f"import sys; from service.cli.verbs import load_verb; load_verb({verb!r}); print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert unneeded & set(done.stdout.split()) == set()
