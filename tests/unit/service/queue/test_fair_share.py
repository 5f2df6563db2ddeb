"""A flood against small tenants, in virtual time."""

import json

import pytest

from tests.bench.fair_share import main

STEP_MS = 20.0
LONG_ANSWERS = ("--flood-tokens", "400", "--flood", "100", "--seconds", "4")


def simulated(capsys, *words) -> dict:
    main(["simulate", "--step-ms", str(STEP_MS), *words])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ("--slots", "256", "--tokens", "60", "--seconds", "3"),
        ("--slots", "64", *LONG_ANSWERS),
        ("--slots", "64", "--blocks", "1200", "--flood-prompt", "200", "--prompt", "100", *LONG_ANSWERS),
    ],
    ids=["a large engine", "long answers", "few blocks"],
)
def test_a_flood_waits_for_itself_though_it_came_first(capsys, words):
    figures = simulated(capsys, *words)
    alone_ms, beside_ms, _ = figures["by_turns_ttft_ms_p99_alone_beside_ratio"]
    assert beside_ms <= 1.5 * alone_ms + STEP_MS
    *_, ratio_without_turns = figures["by_arrival_ttft_ms_p99_alone_beside_ratio"]
    assert ratio_without_turns > 10


def test_few_have_to_leave_for_that(capsys):
    figures = simulated(capsys, "--slots", "64", *LONG_ANSWERS)
    assert 0 < figures["by_turns_preemptions_beside"] <= figures["requests"]
