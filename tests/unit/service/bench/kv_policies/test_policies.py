"""Policies under the engine's own scheduler, and their sums by hand on the smallest traces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from service.bench.kv_policies import replay as memory_replay
from service.bench.kv_policies.policies import POLICIES, Holding, Pool, power_of_two, read_policies
from service.bench.kv_policies.replay import Bench, Lengths, Replay, Slots, WatchedExecutor, fit_lengths, slots_of
from service.bench.kv_policies.simulation import SimulatedClock, SimulatedExecutor, StepCosts
from service.bench.trace import TracedRequest
from service.engine.engine import Engine
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import StartupError

SECOND_A_STEP = StepCosts(fixed_s=1.0, weights_s=0.0, token_s=0.0, cached_token_s=0.0)
POOL = Pool(num_blocks=8, block_size=4, max_model_len=16)
CONTIGUOUS = [name for name in POLICIES if name != "paged"]


@pytest.fixture(autouse=True)
def look_at_each_step(monkeypatch):
    monkeypatch.setattr(memory_replay, "LOOK_EVERY", 1)


class CheckedEngine(Engine):
    """Checks its books after each step."""

    def step(self):
        super().step()
        self.check_invariants()


def replay(name, requests, *, pool=POOL, rate=None, max_num_seqs=16):
    limits = Limits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=512, max_prefill_chunk=512, max_model_len=pool.max_model_len
    )
    engines = []

    def make_engine(kv, on_launch):
        clock = SimulatedClock()
        executor = WatchedExecutor(SimulatedExecutor(clock, SECOND_A_STEP), on_launch)
        engines.append(CheckedEngine(executor, Scheduler(kv, limits), frozenset()))
        return engines[-1], clock

    requests = [TracedRequest(*request) for request in requests]
    figures = Replay(Bench(pool, 97, max_num_seqs, make_engine), POLICIES[name], requests, rate).run()
    assert not engines[0].has_work
    assert engines[0].stats().num_blocks_used == 0
    return figures


def test_one_request_alone_under_paging():
    figures = replay("paged", [(5, 4, 0.0)])
    assert figures.total_s == 4.0
    assert figures.normalized_latency_s == 1.0
    assert figures.output_tokens_per_s == 1.0
    assert (figures.mean_running, figures.peak_running) == (1.0, 1)
    # in its four steps it holds 2 blocks, 8 slots, of which 5, 6, 7 and 8 are filled
    assert figures.use.tokens == pytest.approx((5 + 6 + 7 + 8) / (4 * 32))
    assert figures.use.reserved == pytest.approx((3 + 2 + 1) / (4 * 32))
    assert figures.use.internal == 0
    assert figures.use.held_waste == pytest.approx(6 / 32)


@pytest.mark.parametrize(
    ("name", "tokens", "reserved", "internal", "external"),
    [
        # prompt 5, answer 2: one look at 5 tokens, of which the sixth is still to come, and one at 6
        ("paged", 11, 1, 2 + 2, 0),
        ("oracle:best-fit", 11, 1, 0, 2 + 2),  # wants 6 slots, is given 2 blocks
        ("oracle:buddy", 11, 1, 0, 2 + 2),
        ("reserve-pow2:best-fit", 11, 1, 1 + 1, 1 + 1),  # wants 5 + 2
        ("reserve-max:best-fit", 11, 1, 10 + 10, 0),
        ("reserve-max:buddy", 11, 1, 10 + 10, 0),
        ("static-ft", 11, 1, 10 + 10, 0),
        ("static-hf", 11, 0, 0, 0),
    ],
)
def test_where_the_slots_of_one_request_go(name, tokens, reserved, internal, external):
    use = replay(name, [(5, 2, 0.0)]).use
    shares = (use.tokens, use.reserved, use.internal, use.external)
    assert [64 * share for share in shares] == pytest.approx([tokens, reserved, internal, external])  # over two looks
    assert sum(shares) + use.free == pytest.approx(1)


def test_only_two_of_the_longest_fit_at_once():
    figures = replay("reserve-max:best-fit", [(4, 4, 0.0)] * 4)
    assert figures.peak_running == 2
    assert figures.total_s == 8.0
    assert figures.normalized_latency_s == pytest.approx((4 + 4 + 8 + 8) / 4 / 4)
    assert figures.num_preemptions == 0
    # loaded: requests wait and one of five is done; that is never here, so that it is all of the run
    assert replay("oracle:best-fit", [(4, 4, 0.0)] * 4).total_s == 4.0
    assert replay("paged", [(4, 4, 0.0)] * 4).total_s == 4.0


def test_holes_that_do_not_touch_are_external_fragmentation():
    """Four have 2 blocks each. The first and the third end, 4 blocks are free, and the last wants 3 in one piece: that
    it gets when the second is done."""
    lengths = [(4, 2, 0.0), (4, 4, 0.0), (4, 2, 0.0), (4, 5, 0.0), (10, 2, 0.0)]
    assert replay("oracle:best-fit", lengths).total_s == 6.0
    paged = replay("paged", lengths)
    assert paged.total_s == 5.0
    assert replay("oracle:buddy", lengths).use.external > paged.use.external


def test_a_static_batch_is_padded_and_ends_together():
    figures = replay("static-ft", [(2, 2, 0.0), (4, 3, 0.0), (1, 1, 0.0)])
    assert figures.total_s == 4.0  # 3 for the first two, then the third
    assert figures.normalized_latency_s == pytest.approx((3 / 2 + 3 / 3 + 4 / 1) / 3)
    assert figures.output_tokens_per_s == pytest.approx(6 / 4)
    assert figures.peak_running == 2


def test_a_batch_ends_before_what_would_pad_it_too_long():
    figures = replay("static-ft", [(10, 2, 0.0), (2, 9, 0.0)])  # together 10 + 9 of 16
    assert figures.total_s == 11.0
    assert figures.peak_running == 1


def test_requests_come_when_they_are_due():
    figures = replay("paged", [(4, 2, 1.0), (4, 2, 10.0)], rate=0.5)
    assert figures.total_s == 22.0
    assert figures.normalized_latency_s == 1.0
    assert (figures.rate, figures.requests_per_s) == (0.5, 2 / 22)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_brings_a_mixed_trace_to_its_end(name):
    pool = Pool(num_blocks=37, block_size=8, max_model_len=64)
    requests = [(1 + 7 * number % 31, 1 + 11 * number % 29, number / 3) for number in range(40)]
    figures = replay(name, requests, pool=pool)
    use = figures.use
    assert figures.peak_running <= 16
    assert use.tokens + use.reserved + use.internal + use.external + use.free == pytest.approx(1)
    assert min(use.tokens, use.reserved, use.internal, use.external, use.free) >= 0
    assert figures.output_tokens_per_s * figures.total_s == pytest.approx(sum(request[1] for request in requests))
    assert replay(name, requests, pool=pool, rate=0.5).normalized_latency_s <= figures.normalized_latency_s


def test_contiguous_regions_never_run_out_midway():
    pool = Pool(num_blocks=21, block_size=4, max_model_len=32)
    for name in CONTIGUOUS:
        assert replay(name, [(3, 29, 0.0), (16, 16, 0.0), (1, 31, 0.0)] * 5, pool=pool).num_preemptions == 0


@pytest.mark.parametrize(
    ("padded_prompt", "computed", "holding", "slots"),
    [
        (6, 7, Holding(16, 16), Slots(7, 3, 6, 0)),  # prompt 6 and answer 5 end at 10 slots
        (6, 7, Holding(16, 20), Slots(7, 3, 6, 4)),
        (6, 10, Holding(10, 12), Slots(10, 0, 0, 2)),
        (6, 2, Holding(8, 8), Slots(2, 6, 0, 0)),
        (9, 10, Holding(16, 16), Slots(7, 3, 6, 0)),  # three pads before it
        (9, 10, Holding(10, 10), Slots(7, 0, 3, 0)),  # grown, not reserved
        (9, 2, Holding(16, 16), Slots(0, 10, 6, 0)),
        (9, 14, Holding(16, 16), Slots(0, 0, 16, 0)),  # has all it asked for
    ],
)
def test_slots_of_one_sequence(padded_prompt, computed, holding, slots):
    assert slots_of(SimpleNamespace(num_prompt_tokens=padded_prompt), computed, holding, Lengths(6, 5)) == slots


def test_lengths_are_cut_to_what_a_sequence_may_be():
    long = [TracedRequest(5, 5, 0.0), TracedRequest(30, 5, 1.0), TracedRequest(5, 30, 2.0), TracedRequest(30, 30, 3.0)]
    cut = [(each.num_prompt_tokens, each.num_output_tokens) for each in fit_lengths(long, 16)]
    assert cut == [(5, 5), (8, 5), (5, 11), (8, 8)]


def test_batches_and_powers():
    assert [power_of_two(count) for count in (1, 2, 3, 25, 32, 33)] == [1, 2, 4, 32, 32, 64]
    sizes = {n: POLICIES["static-hf"].max_batch(Pool(num_blocks=n, block_size=4, max_model_len=4)) for n in (1, 7, 8)}
    assert sizes == {1: 1, 7: 4, 8: 8}


def test_policies_are_read_by_name():
    names = [policy.name for policy in read_policies("reserve-max, paged,reserve-max:buddy,oracle:best-fit")]
    assert names == ["reserve-max:buddy", "paged", "oracle:best-fit"]
    with pytest.raises(StartupError, match="--policies: 'orca' is not supported"):
        read_policies("paged,orca")
