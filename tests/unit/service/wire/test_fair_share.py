"""A flood against small tenants, in virtual time."""

import json

from tests.bench.fair_share import main


def test_a_flood_waits_for_itself(capsys):
    main(["simulate", "--seconds", "1.5", "--slots", "256", "--tokens", "60"])
    figures = json.loads(capsys.readouterr().out)
    *_, ratio = figures["by_turns_ttft_ms_p99_alone_beside_ratio"]
    *_, ratio_without_turns = figures["by_arrival_ttft_ms_p99_alone_beside_ratio"]
    assert ratio <= 1.5
    assert ratio_without_turns > 10
