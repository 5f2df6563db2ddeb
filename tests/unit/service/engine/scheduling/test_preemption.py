"""Swap or recompute by cost, on a simulated H200 and ones with a slower bus: `auto` is as good as the better of both,
and better than either where the bus is the bottleneck.

`python -m tests.unit.service.engine.scheduling.test_preemption` prints the whole table of tests/bench/RESULTS.md.
"""

import functools
from dataclasses import replace

import pytest

from service.bench.preemption_modes import mixed_lengths
from tests.support.simulated_swaps import RATES, num_blocks_needed, replay


def slower_bus(times):
    slower = {name: times * getattr(RATES, name) for name in ("block_out_s", "block_in_s", "transfer_s")}
    return replace(RATES, **slower)


@functools.cache
def replayed(lengths, num_blocks, mode, times, prefix_caching):
    return replay(lengths, num_blocks, mode, rates=slower_bus(times), prefix_caching=prefix_caching)


blocks_needed = functools.cache(num_blocks_needed)


def outcomes(lengths, times, modes=("auto", "swap", "recompute"), *, prefix_caching=False):
    """Return figures by mode, on a bus `times` slower."""
    lengths = tuple(lengths)
    num_blocks = int(0.4 * blocks_needed(lengths))
    own_times = {"recompute": times if prefix_caching else 1}  # else it has no host blocks
    return {mode: replayed(lengths, num_blocks, mode, own_times.get(mode, times), prefix_caching) for mode in modes}


def short_mix(count, seed=0):
    """No sequence has more than 640 tokens, so that no single one is what a run takes at its end."""
    prompts_cut = ((min(num_prompt, 320), num_output) for num_prompt, num_output in mixed_lengths(count, seed))
    return [(num_prompt, min(num_output, 640 - num_prompt)) for num_prompt, num_output in prompts_cut]


@pytest.mark.parametrize("times", [1, 10, 100])
def test_auto_is_never_far_behind_the_better_way(times):
    by_mode = outcomes(mixed_lengths(100), times)
    assert min(outcome.num_preemptions for outcome in by_mode.values()) > 10
    best_s = min(by_mode["swap"].total_s, by_mode["recompute"].total_s)
    assert by_mode["auto"].total_s <= 1.03 * best_s
    assert by_mode["recompute"].num_swapped == 0
    assert by_mode["recompute"].computed_again > 5 * by_mode["swap"].computed_again


@pytest.mark.parametrize("times", [1, 10])
def test_auto_swaps_where_others_hardly_feel_it(times):
    """A copy over a ten times slower bus takes longer than computing, but only the victim waits for it."""
    by_mode = outcomes(mixed_lengths(100, seed=1), times, ("auto", "recompute"))
    assert by_mode["auto"].total_s < by_mode["recompute"].total_s
    assert by_mode["auto"].num_swapped > 0.9 * by_mode["auto"].num_preemptions


@pytest.mark.timeout(600)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_auto_mixes_both_when_the_bus_is_the_bottleneck(prefix_caching):
    by_mode = outcomes(short_mix(500), 32, prefix_caching=prefix_caching)
    assert by_mode["auto"].total_s < 0.99 * min(by_mode["swap"].total_s, by_mode["recompute"].total_s)
    assert 0.2 < by_mode["auto"].num_swapped / by_mode["auto"].num_preemptions < 0.8


if __name__ == "__main__":
    for times in (1, 10, 32, 100):
        for mode, outcome in outcomes(mixed_lengths(1000), times).items():
            print(f"{times:>3} times slower {mode:<9} {outcome}")
    for times in (1, 10, 32):
        for seed in range(3):
            for mode, outcome in outcomes(short_mix(500, seed), times, prefix_caching=True).items():
                print(f"{times:>3} times slower, caching, short mix {seed} {mode:<9} {outcome}")
