"""The host's part of a step, timed with the device left out."""

import json
import sys

import pytest

from tests.bench.host_steps import main, measure


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_all_parts_of_a_step_are_timed(prefix_caching, mixed):
    figures = measure(3, 20, 6, prefix_caching=prefix_caching, mixed=mixed)
    parts = (figures.schedule_us, figures.launch_us, figures.settle_us)
    assert min(*parts, figures.report_us) > 0
    assert figures.step_us >= max(parts)
    assert figures.case == f"3 decodes{' and a prompt' if mixed else ''}, cache {'on' if prefix_caching else 'off'}"


def test_steps_with_drafts_are_exposed_between_tokens_and_the_next_launch():
    figures = measure(3, 20, 6, prefix_caching=False, mixed=False, num_drafts=2)
    assert 0 < figures.exposed_us < figures.step_us
    assert figures.case == "3 decodes with 2 drafts, cache off"


def test_the_figures_go_to_a_file(tmp_path, monkeypatch, capsys):
    out = tmp_path / "host.json"
    monkeypatch.setattr(
        sys, "argv", ["host_steps", "--batch", "2", "--context", "9", "--steps", "3", "--out", str(out)]
    )
    main()
    record = json.loads(out.read_text())
    cases = [step["case"] for step in record["steps"]]
    assert len(cases) == 4
    received = capsys.readouterr().out
    assert all(case in received for case in cases)
    assert (record["context"], record["num_steps"]) == (9, 3)
