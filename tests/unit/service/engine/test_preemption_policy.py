"""Swap or recompute by cost, on a simulated H200 and one with a slow bus: `auto` is as good as the better of the two.

`python -m tests.unit.service.engine.test_preemption_policy` prints the whole table of tests/bench/README.md.
"""

from dataclasses import replace

import pytest

from service.cli.bench.preemption_modes import mixed_lengths
from tests.support.simulated_swaps import RATES, num_blocks_needed, replay

SLOW_BUS = replace(RATES, block_out_s=4e-4, block_in_s=4e-4, transfer_s=2e-3)


def outcomes(lengths, rates, share=0.4):
    num_blocks = int(share * num_blocks_needed(lengths))
    return {mode: replay(lengths, num_blocks, mode, rates=rates) for mode in ("auto", "swap", "recompute")}


@pytest.mark.parametrize("rates", [RATES, SLOW_BUS], ids=["fast bus", "slow bus"])
def test_auto_is_never_far_behind_the_better_way(rates):
    by_mode = outcomes(mixed_lengths(150), rates)
    assert min(outcome.num_preemptions for outcome in by_mode.values()) > 10
    best_s = min(by_mode["swap"].total_s, by_mode["recompute"].total_s)
    assert by_mode["auto"].total_s <= 1.05 * best_s
    assert by_mode["recompute"].num_swapped == 0
    assert by_mode["recompute"].computed_again > 5 * by_mode["swap"].computed_again


def test_swapping_wins_on_a_fast_bus_and_auto_swaps_there():
    by_mode = outcomes(mixed_lengths(150, seed=1), RATES)
    assert by_mode["auto"].total_s < by_mode["recompute"].total_s
    assert by_mode["auto"].num_swapped > 0.9 * by_mode["auto"].num_preemptions


if __name__ == "__main__":
    for name, rates in (("fast bus", RATES), ("slow bus", SLOW_BUS)):
        for mode, outcome in outcomes(mixed_lengths(1000), rates).items():
            print(f"{name:<9} {mode:<9} {outcome}")
