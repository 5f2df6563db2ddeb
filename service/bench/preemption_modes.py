"""Compares swap, recompute and auto on requests of mixed lengths in a pool that is too small."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.sampling_params import SamplingParams
from service.bench.engine_measures import TraceFigures, measure_trace
from service.bench.kv_policies.replay import fit_lengths
from service.bench.kv_policies.simulation import MACHINES, SimulatedClock, SimulatedExecutor
from service.bench.trace import TracedRequest
from service.engine.build import BuiltEngine, calibrate_swap_cost
from service.engine.engine import Engine, Executor
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import AUTO, MODES, Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.swap_cost import SwapCostModel
from service.engine.step import FinishedTransfer, StepPlan
from service.errors import StartupError

MEANS = ((150, 330), (150, 330), (20, 60), (60, 1200))
"""Mean (prompt, output) tokens; all pairs are equally likely."""

SIGMA = 0.8


ROUNDS = 3
"""Rounds over all modes, in rotated order."""


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """Median round of one --preemption-mode."""

    mode: str
    output_tokens_per_s: float
    rounds: list[float]  # output tokens/s per round
    ratio: float  # relative to the better of swap and recompute
    total_s: float
    num_preemptions: int
    num_swapped: int
    num_blocks_out: int
    num_blocks_in: int


def mixed_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return (prompt, output) lengths, lognormal around MEANS."""
    rng, lengths = random.Random(seed), []
    for _ in range(count):
        prompt, output = rng.choice(MEANS)
        lengths.append((_lognormal(rng, prompt), _lognormal(rng, output)))
    return lengths


def num_blocks_needed(requests: Sequence[TracedRequest], limits: Limits, block_size: int) -> int:
    """Return the peak number of used blocks without waiting or preemption."""
    plenty = sum(-(-(each.num_prompt_tokens + each.num_output_tokens) // block_size) for each in requests)
    kv = KVManager(plenty, block_size)
    executor = SimulatedExecutor(SimulatedClock(), MACHINES["llama-3.1-8b-h200"].costs)
    engine, most = Engine(executor, Scheduler(kv, limits), frozenset()), 0
    for number, request in enumerate(requests):
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        engine.add_request(
            EngineRequest(request_id=str(number), prompt=(1,) * request.num_prompt_tokens, sampling=params)
        )
    while engine.has_work:
        engine.step()
        engine.drain_request_outputs()
        most = max(most, kv.pool.num_used)
    return most


def measure_modes(
    built: BuiltEngine,
    lengths: Sequence[tuple[int, int]],
    pool_share: float,
    *,
    prefix_caching: bool,
    bus_times: int = 1,
) -> tuple[int, list[ModeFigures]]:
    """Return the pool's blocks and each mode's figures, over a bus that is `bus_times` slower.

    Raises StartupError without a host cache, or if the pool does not fit.
    """
    memory, limits = built.memory, built.limits
    requests = fit_lengths([TracedRequest(*both, 0.0) for both in lengths], limits.max_model_len)
    num_blocks = int(pool_share * num_blocks_needed(requests, limits, memory.block_size))
    if built.executor.host is None:
        raise StartupError("--preemption: --swap-space is missing or 0")
    if num_blocks > memory.num_blocks:
        raise StartupError(f"--preemption: {num_blocks} blocks do not fit (the pool has {memory.num_blocks})")
    executor: Any = _SlowerBusExecutor(built.executor, bus_times) if bus_times > 1 else built.executor
    measured = calibrate_swap_cost(built.executor, memory)
    assert measured is not None
    rates = measured.rates
    rates = replace(rates, block_out_s=bus_times * rates.block_out_s, block_in_s=bus_times * rates.block_in_s)
    runs: dict[str, list[TraceFigures]] = {mode: [] for mode in MODES}
    for number in range(ROUNDS):
        for mode in (*MODES[number:], *MODES[:number]):
            kv = KVManager(num_blocks, memory.block_size, prefix_caching=prefix_caching, swapping=True)
            costs = SwapCostModel(replace(rates), memory.block_size)  # a copy, because the run corrects it
            preemption = Preemption(kv, FairShare(kv, limits.max_num_seqs), costs, mode)
            eos_token_ids = frozenset(built.config.eos_token_ids)
            engine = Engine(executor, Scheduler(kv, limits, preemption=preemption), eos_token_ids)
            run, _ = measure_trace(replace(built, engine=engine), requests, engine_start_s=0.0)
            runs[mode].append(run)
            print(f"{mode}: {run.total_s:.1f} s, {run.output_tokens_per_s:.0f} tokens/s", flush=True)
    return num_blocks, _mode_figures(runs)


def _mode_figures(runs: dict[str, list[TraceFigures]]) -> list[ModeFigures]:
    medians = {mode: sorted(rounds, key=lambda run: run.total_s)[ROUNDS // 2] for mode, rounds in runs.items()}
    best = max(run.output_tokens_per_s for mode, run in medians.items() if mode != AUTO)
    return [
        ModeFigures(
            mode=mode,
            output_tokens_per_s=run.output_tokens_per_s,
            rounds=[each.output_tokens_per_s for each in runs[mode]],
            ratio=run.output_tokens_per_s / best,
            total_s=run.total_s,
            num_preemptions=run.num_preemptions,
            num_swapped=run.num_swapped,
            num_blocks_out=run.num_blocks_out,
            num_blocks_in=run.num_blocks_in,
        )
        for mode, run in medians.items()
    ]


class _SlowerBusExecutor:
    """Executor with a slower bus: each block of a transfer is copied `times` times."""

    def __init__(self, executor: Executor, times: int) -> None:
        self._executor = executor
        self._times = times

    def launch(self, plan: StepPlan) -> Any:
        return self._executor.launch(self._slowed(plan))

    def transfer(self, plan: StepPlan) -> None:
        self._executor.transfer(self._slowed(plan))

    def finished_transfers(self) -> list[FinishedTransfer]:
        return [
            done._replace(num_blocks=done.num_blocks // self._times) for done in self._executor.finished_transfers()
        ]

    def _slowed(self, plan: StepPlan) -> StepPlan:
        return replace(plan, swap_outs=plan.swap_outs * self._times, swap_ins=plan.swap_ins * self._times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def _lognormal(rng: random.Random, mean: int) -> int:
    return max(2, min(4 * mean, round(mean * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA))))
