"""Runs of a comparison, on the real engine or simulated with a process per core; and the rates to compare at."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from service.bench.flag_values import positive_number
from service.bench.kv_policies.policies import POLICIES, ComparedKV, Policy, Pool
from service.bench.kv_policies.replay import Bench, Clock, Replay, ReplayFigures, WallClock, Watch, WatchedExecutor
from service.bench.kv_policies.sharing import SharingFigures, measure_sharing, random_prompts, written_prompts
from service.bench.kv_policies.simulation import MACHINES, SimulatedClock, SimulatedExecutor, SimulatedSampler
from service.bench.trace import TracedRequest
from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import StartupError
from service.queue.embedded.die_with_parent import die_with_parent

PAPER_MAX_LEN = 2048
"""Default maximum sequence length, from the paper."""

SIMULATED_BATCHED_TOKENS = 8192
SIMULATED_PREFILL_CHUNK = 512
"""The engine's defaults on a GPU."""

SIMULATED_VOCAB = 32768

WARM_REQUESTS = 8

Widths = Sequence[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A policy at a rate (None: all at once) with the requests of `seconds`; given up above a normalized latency."""

    policy: Policy
    rate: float | None = None
    seconds: float = math.inf
    give_up_s: float = math.inf

    def of(self, requests: Sequence[TracedRequest]) -> list[TracedRequest]:
        """Return the requests that arrive in time, at least one."""
        rate = math.inf if self.rate is None else self.rate
        return [each for number, each in enumerate(requests) if number == 0 or each.arrival <= self.seconds * rate]


Runs = Sequence[Run]


@dataclass(frozen=True)
class Ground:
    """Runs replays. `replay` returns figures in order; `share` those per method and width, all requests at once."""

    description: dict[str, Any]
    pool: Pool
    replay: Callable[[Sequence[TracedRequest], Runs], list[ReplayFigures]]
    share: Callable[[Sequence[TracedRequest], Widths], list[SharingFigures]]


def real_ground(settings: Settings) -> Ground:
    """Return a runner on the real engine, with one model and cache. Raises StartupError."""
    if settings.num_gpu_blocks is None:
        settings = replace(settings, num_gpu_blocks=MACHINES["opt-13b-a100"].num_blocks)
    built = build_engine(replace(settings, max_model_len=settings.max_model_len or PAPER_MAX_LEN), progress=True)
    pool = Pool(
        num_blocks=built.memory.num_blocks,
        block_size=built.memory.block_size,
        max_model_len=built.limits.max_model_len,
    )
    bench = Bench(pool, built.config.vocab_size, built.limits.max_num_seqs, partial(_real_engine, built))
    short = TracedRequest(pool.max_model_len // 16 + 1, 8, 0.0)
    Replay(bench, POLICIES["paged"], [short] * WARM_REQUESTS, None).run()
    description = {
        "device": built.ops.device_name,
        "is_simulated": False,
        "model": settings.model_config or (settings.model and settings.model.name),
        "dtype": str(built.ops.dtype),
    }
    share = partial(_share_in_turn, built, settings.enable_prefix_caching, settings.load_format == "dummy")
    return Ground(description, pool, partial(_replay_in_turn, bench), share)


def simulated_ground(settings: Settings, machine_name: str) -> Ground:
    machine = MACHINES[machine_name]
    pool = Pool(
        num_blocks=settings.num_gpu_blocks or machine.num_blocks * 16 // settings.block_size,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len or PAPER_MAX_LEN,
    )
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or SIMULATED_BATCHED_TOKENS,
        max_prefill_chunk=settings.max_prefill_chunk or SIMULATED_PREFILL_CHUNK,
        max_model_len=pool.max_model_len,
    )
    description = {"device": f"{machine_name}, simulated", "is_simulated": True, "costs": asdict(machine.costs)}
    simulation = _Simulation(machine_name, pool, limits, settings.enable_prefix_caching)
    return Ground(
        description, pool, partial(_replay_in_processes, simulation), partial(_share_in_processes, simulation)
    )


@dataclass(frozen=True)
class _Simulation:
    machine: str
    pool: Pool
    limits: Limits
    prefix_caching: bool

    def replay(
        self, requests: Sequence[TracedRequest], policy: str, rate: float | None, give_up_s: float
    ) -> ReplayFigures:
        bench = Bench(self.pool, SIMULATED_VOCAB, self.limits.max_num_seqs, self._engine)
        return Replay(bench, POLICIES[policy], list(requests), rate, give_up_s).run()

    def _engine(self, kv: ComparedKV, on_launch: Watch) -> tuple[Engine, Clock]:
        clock = SimulatedClock()
        executor = WatchedExecutor(SimulatedExecutor(clock, MACHINES[self.machine].costs), on_launch)
        return Engine(executor, Scheduler(kv, self.limits), frozenset()), clock

    def share(self, requests: Sequence[TracedRequest], method: str, width: int) -> SharingFigures:
        executor = SimulatedSampler(SimulatedClock(), MACHINES[self.machine].costs, SIMULATED_VOCAB)
        kv = KVManager(self.pool.num_blocks, self.pool.block_size, prefix_caching=self.prefix_caching)
        engine = Engine(executor, Scheduler(kv, self.limits), frozenset())
        return measure_sharing(engine, random_prompts(requests, SIMULATED_VOCAB), requests, method, width)


def _replay_in_processes(simulation: _Simulation, requests: Sequence[TracedRequest], runs: Runs) -> list[ReplayFigures]:
    return _in_processes(
        simulation.replay, [(run.of(requests), run.policy.name, run.rate, run.give_up_s) for run in runs]
    )


def _share_in_processes(
    simulation: _Simulation, requests: Sequence[TracedRequest], widths: Widths
) -> list[SharingFigures]:
    return _in_processes(partial(simulation.share, requests), widths)


def _in_processes(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run tasks in a process per core. The processes end with this one, which alone handles Ctrl-C."""
    num_processes = min(os.cpu_count() or 1, len(tasks))
    if num_processes < 2:
        return [function(*task) for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, initializer=_end_with, initargs=(os.getpid(),)) as processes:
        try:
            with _sigint_deferred():
                futures = [processes.submit(function, *task) for task in tasks]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():  # else the pool waits for running tasks
                process.kill()
            raise


def _end_with(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:  # already ended
        os._exit(1)


@contextmanager
def _sigint_deferred() -> Iterator[None]:
    """Block SIGINT in processes started within the context."""
    received: list[int] = []
    # The signal is delivered to a thread that does not block it.
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _real_engine(built: BuiltEngine, kv: ComparedKV, on_launch: Watch) -> tuple[Engine, Clock]:
    executor = WatchedExecutor(built.executor, on_launch)
    return Engine(executor, Scheduler(kv, built.limits), frozenset(built.config.eos_token_ids)), WallClock()


def _replay_in_turn(bench: Bench, requests: Sequence[TracedRequest], runs: Runs) -> list[ReplayFigures]:
    figures = []
    for run in runs:
        figures.append(Replay(bench, run.policy, run.of(requests), run.rate, run.give_up_s).run())
        pace = "all at once" if run.rate is None else f"{run.rate:.3g} requests/s"
        seconds, latency_s = figures[-1].total_s, figures[-1].normalized_latency_s
        print(f"{run.policy.name}, {pace}: {seconds:.1f} s, {latency_s:.4f} s a token", flush=True)
    return figures


def _share_in_turn(
    built: BuiltEngine, prefix_caching: bool, is_dummy: bool, requests: Sequence[TracedRequest], widths: Widths
) -> list[SharingFigures]:
    """Measure sharing in turn. With random weights the prompts are random: written ones would be no better."""
    config, memory = built.config, built.memory

    def idle_engine() -> Engine:
        kv = KVManager(memory.num_blocks, memory.block_size, prefix_caching=prefix_caching)
        return Engine(built.executor, Scheduler(kv, built.limits), frozenset(config.eos_token_ids))

    if is_dummy:
        prompts = random_prompts(requests, config.vocab_size)
    else:
        lengths = [request.num_prompt_tokens for request in requests]
        prompts = written_prompts(idle_engine(), lengths, config.bos_token_id or 0)
    figures = []
    for method, width in widths:
        figures.append(measure_sharing(idle_engine(), prompts, requests, method, width))
        print(f"{method}, {width}: {100 * figures[-1].saved:.1f} % saved", flush=True)
    return figures


RATE_SHARES = (0.3, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Default rates, around the knee of the latency curve, as multiples of the loaded rate."""

LATENCY_FACTOR = 5.0
"""Default latency limit, as a multiple of the first policy's minimum."""

PLAINLY_OVER = 2.0
"""Multiple of a given limit above which a run is given up."""


@dataclass(frozen=True, kw_only=True)
class PolicyFigures:
    """Figures of one policy. Rates are in requests/s; latencies are normalized: seconds per output token."""

    policy: str
    loaded: ReplayFigures | None  # None if no run had all requests at once
    loaded_rate: float | None
    curve: list[ReplayFigures]  # in order of rate
    rate_at_limit: float | None  # None: over the limit at every rate
    is_limit_reached: bool  # False: the highest rate tried
    running_ratio: float | None  # the first policy's figure over this one's: sequences,
    loaded_ratio: float | None  # loaded requests/s,
    limit_ratio: float | None  # requests/s at the limit; None if unknown


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All policies; the first is the baseline."""

    latency_limit_s: float
    policies: list[PolicyFigures]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    rates_of: Callable[[str, float | None], Sequence[float]]
    """Maps a policy's name and loaded rate to its rates."""
    latency_limit_s: float | None = None
    seconds: float = math.inf  # of arrivals, per rate
    is_loaded: bool = True  # also run all requests at once


def compare(
    replay: Callable[[Runs], list[ReplayFigures]], policies: Sequence[Policy], mean_output: float, sweep: Sweep
) -> Comparison:
    """Compare policies by runs that `replay` executes in order."""
    nothing: list[None] = [None] * len(policies)
    loaded: Sequence[ReplayFigures | None] = (
        replay([Run(policy=policy) for policy in policies]) if sweep.is_loaded else nothing
    )
    loaded_rates = [None if each is None else each.loaded_tokens_per_s / mean_output for each in loaded]
    limit_s = sweep.latency_limit_s
    give_up_s = math.inf if limit_s is None else PLAINLY_OVER * limit_s
    runs = replay(
        [
            Run(policy=policy, rate=rate, seconds=sweep.seconds, give_up_s=give_up_s)
            for policy, loaded_rate in zip(policies, loaded_rates, strict=True)
            for rate in sweep.rates_of(policy.name, loaded_rate)
        ]
    )
    curves = [[run for run in runs if run.policy == policy.name] for policy in policies]
    if limit_s is None:
        limit_s = LATENCY_FACTOR * min(run.normalized_latency_s for run in curves[0] or loaded[:1] if run is not None)
    limits = [rate_at(curve, limit_s) for curve in curves]
    running = [None if each is None else each.mean_running for each in loaded]
    is_reached = [any(run.normalized_latency_s > limit_s for run in curve) for curve in curves]
    figures = [
        PolicyFigures(
            policy=policy.name,
            loaded=loaded[i],
            loaded_rate=loaded_rates[i],
            curve=curves[i],
            rate_at_limit=limits[i],
            is_limit_reached=is_reached[i],
            running_ratio=_ratio(running[0], running[i]),
            loaded_ratio=_ratio(loaded_rates[0], loaded_rates[i]),
            limit_ratio=_ratio(limits[0], limits[i]) if is_reached[i] or i == 0 else None,
        )
        for i, policy in enumerate(policies)
    ]
    return Comparison(latency_limit_s=limit_s, policies=figures)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return None if one is unknown or everything ended within one step."""
    return None if ours is None or not theirs else ours / theirs


def rate_at(curve: Sequence[ReplayFigures], latency_limit_s: float) -> float | None:
    """Return the rate at which the curve crosses the limit.

    Interpolates linearly in rate and log latency. Returns the last rate if the curve never crosses, None if it starts
    above the limit. A run that was given up counts with its lower bound.
    """
    if not curve or curve[0].normalized_latency_s > latency_limit_s:
        return None
    for below, above in pairwise(curve):
        if above.normalized_latency_s > latency_limit_s:
            low, high, limit = (
                math.log(each) for each in (below.normalized_latency_s, above.normalized_latency_s, latency_limit_s)
            )
            if below.rate is None or above.rate is None:
                raise AssertionError("a curve is made of runs at a rate")
            return below.rate + (above.rate - below.rate) * (limit - low) / (high - low)
    return curve[-1].rate


def read_rates(text: str | None, policies: Collection[str]) -> Callable[[str, float | None], list[float]]:
    """Parse `Sweep.rates_of` from "20,1.25x;oracle=9,10". Raises StartupError.

    Rates without a name apply to all other policies.
    """
    if text is None:
        return lambda policy, loaded_rate: [_share_of(loaded_rate, share) for share in RATE_SHARES]
    if text.strip() == "0":
        return lambda policy, loaded_rate: []
    rates: dict[str, list[tuple[float, bool]]] = {}
    for part in text.split(";"):
        name, _, values = part.rpartition("=")
        found = {policy for policy in policies if name.strip() in ("", policy, policy.partition(":")[0])}
        if not found:
            raise StartupError(f"--rates: {name.strip()!r} is no policy of this comparison")
        parsed = [_rate(value.strip()) for value in values.split(",")]
        rates |= {policy: parsed for policy in found if name or policy not in rates}
    return lambda policy, loaded_rate: sorted(
        _share_of(loaded_rate, rate) if is_share else rate for rate, is_share in rates.get(policy, ())
    )


def _share_of(loaded_rate: float | None, share: float) -> float:
    if loaded_rate is None:
        raise AssertionError("a share of the loaded rate needs a loaded run")
    return share * loaded_rate


def _rate(text: str) -> tuple[float, bool]:
    """Return (number, whether it is a multiple of the loaded rate)."""
    is_share = text.endswith("x") and text != "x"
    return positive_number("--rates", text.removesuffix("x") if is_share else text), is_share
