"""Sequences that leave for the host and come back: by copies or by computing, whichever is cheaper."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import PROTECTED_STEPS, Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.swap_cost import COPY_SLOWDOWN, EngineLoad, Rates, SwapCostModel
from tests.fakes.scripted_executor import ScriptedExecutor
from tests.support.demo_engine import DEMO, TWO_LAYERS, DemoEngines, run_all
from tests.support.random_operations import alone

SIZE = 4


def rates(transfer_s=0.0, block_s=1e-5, token_s=1e-3):
    return Rates(token_s=token_s, pair_s=1e-6, block_out_s=block_s, block_in_s=block_s, transfer_s=transfer_s)


def engine_of(costs=None, mode="auto", num_blocks=24, num_host_blocks=40, transfer_steps=1, caching=False, max_len=64):
    executor = ScriptedExecutor(
        num_blocks, SIZE, runs_ahead=True, num_host_blocks=num_host_blocks, transfer_steps=transfer_steps
    )
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk=64, max_model_len=max_len)
    kv = KVManager(num_blocks, SIZE, prefix_caching=caching, swapping=num_host_blocks > 0)
    preemption = Preemption(kv, FairShare(kv, 8), None if costs is None else SwapCostModel(costs, SIZE), mode)
    return Engine(executor, Scheduler(kv, limits, preemption=preemption), frozenset({7})), executor, kv


def load(engine, count=6, prompt_len=10, max_tokens=30):
    """More than the pool holds; runs all of them to their ends, each as it would end alone."""
    for n in range(count):
        params = SamplingParams(max_tokens=max_tokens)
        prompt = (n, *range(20, 20 + prompt_len - 1))
        engine.add_request(EngineRequest(request_id=str(n), prompt=prompt, sampling=params))
    received = {}
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.drain_request_outputs():
            received.setdefault(output.request_id, []).extend(
                token for part in output.parts for token in part.token_ids
            )
    for n in range(count):
        assert received[str(n)] == alone((n, *range(20, 20 + prompt_len - 1)), 0, max_tokens)[0]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("transfer_steps", [0, 1, 4])
def test_who_was_swapped_comes_back_without_computing_it_again(caching, transfer_steps):
    engine, executor, kv = engine_of(mode="swap", transfer_steps=transfer_steps, caching=caching)
    load(engine)
    preemption = engine._scheduler.preemption
    assert preemption.num_swapped > 0
    assert preemption.num_recomputed == 0
    assert kv.host.num_blocks_in > 0
    num_tokens = sum(10 + len(alone((n, *range(20, 29)), 0, 30)[0]) for n in range(6))
    again = sum(plan.num_tokens for plan in executor.plans) - num_tokens
    assert again <= preemption.num_swapped * 2 * SIZE, "no more than the block that was not full, and what was pending"


def test_without_a_second_tier_nothing_is_copied():
    engine, executor, kv = engine_of(num_host_blocks=0)
    load(engine)
    assert engine._scheduler.preemption.num_recomputed == engine.stats().num_preemptions > 0
    assert kv.host is None
    assert not any(plan.swap_outs or plan.swap_ins for plan in executor.plans)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_what_preemptions_cost_is_counted(mode, num_host_blocks):
    engine, executor, _ = engine_of(mode=mode, num_host_blocks=num_host_blocks)
    load(engine)
    stats = engine.stats()
    lengths = [10 + len(alone((n, *range(20, 29)), 0, 30)[0]) for n in range(6)]
    num_computed = sum(plan.num_tokens for plan in executor.plans)
    assert stats.num_recomputed_tokens == num_computed - sum(length - 1 for length in lengths) > 0
    assert stats.recompute_s > 0
    # The scripted device copies a block in 0.1 ms.
    assert stats.swap_out_s == pytest.approx(1e-4 * stats.num_blocks_out)
    assert stats.swap_in_s == pytest.approx(1e-4 * stats.num_blocks_in)
    assert (stats.swap_in_s > 0) == (mode == "swap" and num_host_blocks > 0)


def test_nothing_is_counted_as_computed_again_that_none_had_to_leave():
    engine, _, _ = engine_of(mode="recompute", num_blocks=128)
    load(engine)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens, stats.recompute_s) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("costs", "kind"),
    [(rates(), "num_swapped"), (rates(block_s=1.0), "num_recomputed"), (rates(transfer_s=1.0), "num_recomputed")],
)
def test_auto_does_what_is_cheaper(costs, kind):
    engine, _, _ = engine_of(costs)
    load(engine)
    assert getattr(engine._scheduler.preemption, kind) == engine.stats().num_preemptions > 0


def test_recompute_never_keeps_anything_for_a_victim():
    engine, executor, _ = engine_of(rates(), mode="recompute")
    load(engine)
    assert engine._scheduler.preemption.num_recomputed == engine.stats().num_preemptions > 0
    assert not any(plan.swap_ins for plan in executor.plans)


def test_a_full_host_makes_victims_compute_again():
    engine, _, _ = engine_of(mode="swap", num_host_blocks=3)
    load(engine)
    assert engine._scheduler.preemption.num_recomputed > 0


def test_what_has_to_leave_soon_is_copied_before_it_must():
    engine, executor, _ = engine_of(mode="swap", num_blocks=64, num_host_blocks=80, transfer_steps=1, max_len=128)
    load(engine, count=8, prompt_len=12, max_tokens=60)
    assert engine.stats().num_preemptions > 0
    waits = sum(not plan.chunks for plan in executor.plans)
    assert waits == 0, "a sequence waited for a copy"


def test_evicted_prefixes_come_back_from_the_host():
    engine, _, kv = engine_of(rates(), num_blocks=64, num_host_blocks=120, caching=True)
    prompt = tuple(range(30, 58))

    def ask(name, prompt):
        engine.add_request(EngineRequest(request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=8)))
        while engine.has_work:
            engine.step()
            engine.check_invariants()
        return engine.drain_request_outputs()[-1]

    ask("first", prompt)
    for n in range(12):
        ask(str(n), tuple(range(n * 7, n * 7 + 28)))
    assert kv.pool.num_cached < 13 * 8, "all of them do not fit"
    again = ask("again", prompt)
    assert again.num_cached_tokens == 27 - 27 % SIZE
    assert kv.host.num_blocks_in > 0


def test_a_group_that_was_just_brought_back_is_the_last_to_leave():
    engine, _, _ = engine_of(mode="swap", num_blocks=60)
    for n in range(4):
        engine.add_request(
            EngineRequest(request_id=str(n), prompt=(n, 1, 2, 3, 4), sampling=SamplingParams(max_tokens=50))
        )
    for _ in range(3):
        engine.step()
    preemption, running = engine._scheduler.preemption, engine._scheduler.running
    order = []
    for _ in range(4):
        group = preemption._next_victim(running)
        order.append(group.request_id)
        preemption._resumed_at_step[group] = preemption._step
    assert order == ["3", "2", "1", "3"]
    preemption._step += PROTECTED_STEPS + 1
    assert preemption._next_victim(running).request_id == "3"
    preemption._preempt(running[-1].group, running)
    preemption._preempt(running[1].group, running)
    preemption._preempt(running[1].group, running)
    assert preemption._next_victim(running).request_id == "0", "the oldest only when it is alone"


def test_short_sequences_are_computed_and_long_ones_copied():
    costs = SwapCostModel(rates(transfer_s=4e-3, block_s=1e-3, token_s=5e-4), SIZE)
    crossover = costs.crossover_tokens(10_000)
    assert crossover % SIZE == 0
    for tokens, cheaper in ((crossover - SIZE, False), (crossover, True), (4 * crossover, True)):
        swap_s = costs.swap_s(tokens // SIZE, tokens // SIZE, EngineLoad())
        assert (swap_s < costs.recompute_s(0, tokens)) is cheaper
    assert SwapCostModel(rates(block_s=1.0), SIZE).crossover_tokens(10_000) is None
    assert costs.copy_in_s(0) == costs.copy_out_s(0) == costs.swap_s(0, 0, EngineLoad()) == 0


def test_copies_hold_up_one_of_many_until_all_wait_for_the_bus():
    """Blocks of 1 ms each way during steps of 10 ms: 20 of them out and in, of tokens that take 0.25 ms each."""
    costs = SwapCostModel(rates(block_s=1e-3, token_s=2.5e-4), SIZE)
    costs.on_decode_step(0.01)
    recompute_s = costs.recompute_s(0, 20 * SIZE)

    def swap_s(**load):
        return costs.swap_s(20, 20, EngineLoad(**load))

    assert swap_s() == pytest.approx((1 + COPY_SLOWDOWN) * 0.04), "alone it waits for both"
    assert swap_s() > recompute_s > swap_s(num_running=10)
    in_sight_s, at_a_block_s = 0.02, 2 * SIZE * 0.01
    assert swap_s(num_running=10) == pytest.approx(
        COPY_SLOWDOWN * 0.04 + (1 / 10 + in_sight_s / at_a_block_s) * in_sight_s + 1 / 10 * 0.02
    )
    assert swap_s(num_running=10, num_swapping_out=30) > recompute_s, "who needs a block waits for those that go before"
    assert swap_s(num_running=10, num_swapping_in=30) == pytest.approx(swap_s(num_running=10) + 0.03 / 10)
    assert costs.swap_s(0, 20, EngineLoad(num_running=10, num_swapping_out=1000)) < recompute_s, (
        "what is saved need not go out"
    )


@pytest.mark.parametrize(("names", "num_exclusive"), [(("victim",), 8), (("other", "victim"), 2)])
def test_what_others_keep_of_a_victim_is_neither_computed_again_nor_brought_back(names, num_exclusive):
    """24 tokens in common and 8 of its own. Copying costs 0.8 of what computing does, for what is copied both ways."""
    engine, _, kv = engine_of(rates(block_s=0.4 * SIZE * 1e-3), num_blocks=60, caching=True)
    for name in names:
        prompt = (*range(20, 44), *range(50 + len(name), 58 + len(name)))
        engine.add_request(EngineRequest(request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=30)))
    engine.step()
    engine.step()
    preemption, group = engine._scheduler.preemption, engine._scheduler.running[-1].group
    assert kv.swap_footprint(group.live) == (8, 8, num_exclusive)
    preemption._num_running = 1
    assert preemption._prefers_swap(group) is (num_exclusive == 8), "all would have to be saved for the sake of two"
    kv.save_to_host(group.live[0])
    assert kv.swap_footprint(group.live) == (8, 0, num_exclusive), "a copy under way keeps nothing"
    assert preemption._prefers_swap(group)


def test_costs_follow_what_is_seen():
    costs = SwapCostModel(rates(block_s=1e-3, token_s=1e-4), SIZE)
    for _ in range(100):
        costs.on_transfer(100, 0.2, out=True)
        costs.on_transfer(100, 0.05, out=False)
        costs.on_transfer(1, 5.0, out=False)
        costs.on_decode_step(0.01)
        costs.on_prefill_step([(0, 1000)], 0.01 + 0.02, with_decodes=True)
        costs.on_prefill_step([(0, 10)], 9.0, with_decodes=True)
    assert costs.rates.block_out_s == pytest.approx(2e-3, rel=0.01)
    assert costs.rates.block_in_s == pytest.approx(5e-4, rel=0.01)
    assert costs.recompute_s(0, 1000) == pytest.approx(0.02, rel=0.02)


def test_steps_faster_than_the_last_decode_are_ignored_for_prompts():
    """Decodes have become quicker meanwhile, and none was timed alone: under a long queue every step has prompts."""
    costs = SwapCostModel(rates(token_s=1e-4), SIZE)
    before_s = costs.recompute_s(0, 512)
    costs.on_decode_step(0.05)
    for _ in range(20_000):
        costs.on_prefill_step([(0, 512)], 0.03, with_decodes=True)
    assert costs.recompute_s(0, 512) == before_s


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(NumpyOps(np.dtype(np.float32)), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def by_themselves(engines):
    return engines.each_alone()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_demo_model_generates_the_same_after_a_swap_on_poisoned_blocks(engines, by_themselves, prefix_caching):
    engine = engines.make(num_blocks=22, num_host_blocks=60, prefix_caching=prefix_caching, poisons=True)
    received = run_all(engine)
    assert engine._scheduler.preemption.num_swapped > 0
    assert engine._kv.host.num_blocks_in > 0
    assert {name: tokens for name, (tokens, _) in received.items()} == by_themselves


@pytest.mark.parametrize("max_model_len", [2, 3, 4])
def test_an_engine_for_the_shortest_sequences_proves_itself_too(max_model_len):
    asked = {"model": DEMO, "device": "cpu", "max_model_len": max_model_len, "num_gpu_blocks": 4}
    assert build_engine(Settings(**asked), progress=False).engine.stats().num_output_tokens > 0


def test_an_engine_is_built_with_the_configured_tiers(caplog):
    asked = {"model": DEMO, "device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks": 40}
    with caplog.at_level("INFO", logger="quire.engine"):
        built = build_engine(Settings(swap_space=0.001, **asked), progress=False)
    assert 0 < built.executor.num_host_blocks == int(0.001 * (1 << 30)) // built.memory.block_bytes
    assert "crossover_tokens=" in caplog.text
    assert built.engine._scheduler.preemption.costs.rates.token_s > 0
    assert build_engine(Settings(**asked), progress=False).executor.host is None
