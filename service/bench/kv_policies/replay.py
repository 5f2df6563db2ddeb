"""Replays a trace through an engine under one policy, on a real or simulated clock.

Arrivals are open-loop. A static policy forms a batch of the earliest waiting requests once the previous batch is done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from model.sampling_params import SamplingParams
from service.bench.kv_policies.policies import ComparedKV, Holding, Policy, Pool
from service.bench.trace import TracedRequest
from service.engine.engine import Engine, Executor
from service.engine.request import EngineRequest
from service.engine.sequence import Sequence
from service.engine.step import StepPlan
from service.errors import EndReason


class Lengths(NamedTuple):
    num_prompt: int
    num_output: int


@dataclass(frozen=True, kw_only=True)
class SlotUse:
    """Shares of the pool over time; they sum to 1."""

    tokens: float
    reserved: float
    internal: float
    external: float
    free: float  # while no request waits for it

    @property
    def held_waste(self) -> float:
        """Share of held slots that are empty."""
        held = self.tokens + self.reserved + self.internal
        return 1 - self.tokens / held if held else 0.0


class Slots(NamedTuple):
    tokens: int
    reserved: int
    internal: int
    rounding: int


def slots_of(sequence: Sequence, num_computed: int, holding: Holding, lengths: Lengths) -> Slots:
    """Split a sequence's slots by use. Padding is never useful, nor any slot while only the rest of the batch runs."""
    num_padding = sequence.num_prompt_tokens - lengths.num_prompt
    num_pads_held = min(num_padding, num_computed)
    is_needed = num_computed < sequence.num_prompt_tokens + lengths.num_output
    num_final = lengths.num_prompt + lengths.num_output - 1 if is_needed else 0
    filled = min(num_computed - num_pads_held, num_final)
    useful = max(filled, min(holding.given - num_padding, num_final)) if holding.given > num_computed else filled
    return Slots(
        tokens=filled,
        reserved=useful - filled,
        internal=holding.given - useful,
        rounding=holding.taken - holding.given,
    )


class Look(NamedTuple):
    num_running: int
    tokens: int
    reserved: int
    internal: int
    external: int
    free: int


class SlotLedger:
    """Time-weighted sum of looks at the running sequences."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(Look._fields)
        self.seconds = 0.0
        self.peak_running = 0

    def add(self, look: Look, seconds: float) -> None:
        for place, count in enumerate(look):
            self._sums[place] += count * seconds
        self.seconds += seconds
        self.peak_running = max(self.peak_running, look.num_running)

    @property
    def mean_running(self) -> float:
        return self._sums[0] / self.seconds if self.seconds else 0.0

    def use(self) -> SlotUse:
        parts = self._sums[1:] if any(self._sums[1:]) else [0, 0, 0, 0, 1]
        tokens, reserved, internal, external, free = (part / sum(parts) for part in parts)
        return SlotUse(tokens=tokens, reserved=reserved, internal=internal, external=external, free=free)


def look_at(
    running: Mapping[Sequence, int], kv: ComparedKV, num_slots: int, lengths: Mapping[str, Lengths], *, is_short: bool
) -> Look:
    """Split the pool's `num_slots` by use.

    `running`: computed tokens by sequence; `is_short`: a request waits for memory.
    """
    tokens = reserved = internal = rounding = 0
    for sequence, num_computed in running.items():
        slots = slots_of(sequence, num_computed, kv.holding(sequence, num_computed), lengths[sequence.request_id])
        tokens += slots.tokens
        reserved += slots.reserved
        internal += slots.internal
        rounding += slots.rounding
    holes = num_slots - tokens - reserved - internal - rounding
    external, free = (rounding + holes, 0) if is_short else (rounding, holes)
    return Look(len(running), tokens, reserved, internal, external, free)


LOOK_EVERY = 4
"""Steps between looks, which are taken while a step runs."""

WARM_SHARE = 0.2
"""Share of requests that must finish before a run counts as loaded."""


class Clock(Protocol):
    """Seconds since the start."""

    @property
    def now_s(self) -> float: ...

    def wait_until(self, due_s: float) -> None:
        """Wait until `due_s`; return at once if it is past."""


class WallClock:
    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def wait_until(self, due_s: float) -> None:
        while (left_s := due_s - self.now_s) > 0:
            time.sleep(left_s)


Watch = Callable[[StepPlan], None]


class WatchedExecutor:
    """Executor that reports each step before launching it."""

    def __init__(self, executor: Executor, on_launch: Watch):
        self._executor = executor
        self._on_launch = on_launch

    def launch(self, plan: StepPlan) -> Any:
        self._on_launch(plan)
        return self._executor.launch(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@dataclass(frozen=True)
class Bench:
    """Environment of a replay. `make_engine` returns a new engine over a KV manager, with its clock at 0."""

    pool: Pool
    vocab_size: int
    max_num_seqs: int
    make_engine: Callable[[ComparedKV, Watch], tuple[Engine, Clock]]


@dataclass(frozen=True, kw_only=True)
class ReplayFigures:
    """One policy at one rate.

    A run is loaded while requests wait for memory and the first ones are done. If it never is, the loaded figures cover
    the whole run.
    """

    policy: str
    rate: float | None  # requests/s; None: all at once
    num_requests: int
    total_s: float
    requests_per_s: float
    output_tokens_per_s: float
    normalized_latency_s: float  # seconds from due to done per output token, mean over requests
    is_given_up: bool  # latency is a lower bound; other figures cover the time until then
    loaded_s: float
    loaded_tokens_per_s: float
    mean_running: float
    peak_running: int
    use: SlotUse
    num_preemptions: int


def fit_lengths(requests: Iterable[TracedRequest], max_model_len: int) -> list[TracedRequest]:
    """Cut prompts to half the maximum length, and outputs to the rest."""
    fitted = []
    for request in requests:
        num_prompt = min(request.num_prompt_tokens, max_model_len // 2)
        num_output = min(request.num_output_tokens, max_model_len - num_prompt)
        fitted.append(TracedRequest(num_prompt, num_output, request.arrival))
    return fitted


class _Seen(NamedTuple):
    """The last look, and whether the run was loaded then."""

    at_s: float
    look: Look
    is_loaded: bool


class Replay:
    """A run of requests from `fit_lengths`. `rate` None: all at once."""

    def __init__(
        self,
        bench: Bench,
        policy: Policy,
        requests: list[TracedRequest],
        rate: float | None,
        give_up_s: float = math.inf,
    ):
        """Run to the end, or until the normalized latency is bound to reach `give_up_s`."""
        self._bench = bench
        self._policy = policy
        self._requests = requests
        self._rate = rate
        self._give_up_s = give_up_s
        self._num_outputs = [request.num_output_tokens for request in requests]
        self._due_s = [0.0 if rate is None else request.arrival / rate for request in requests]
        self._end_s = np.full(len(requests), np.inf)
        self._num_ended = 0
        self._kv = policy.make_kv(bench.pool)
        self._engine, self._clock = bench.make_engine(self._kv, self._watch)
        self._max_batch = None if policy.max_batch is None else policy.max_batch(bench.pool)
        self._coming = deque(range(len(requests)))
        self._queue: deque[int] = deque()
        self._random = np.random.default_rng(0)
        self._lengths = {str(n): Lengths(r.num_prompt_tokens, r.num_output_tokens) for n, r in enumerate(requests)}
        self._ledger, self._loaded = SlotLedger(), SlotLedger()
        self._loaded_tokens = self._new_tokens = self._num_steps = 0
        self._seen: _Seen | None = None

    def run(self) -> ReplayFigures:
        while self._num_ended < len(self._requests) and not self._is_over():
            self._admit()
            if self._engine.has_work:
                self._engine.step()
                self._hear()
            else:
                self._book()
                self._clock.wait_until(self._due_s[self._coming[0]])
        self._book()
        figures = self._figures()
        self._engine.cancel_all(EndReason.CANCELLED)
        while self._engine.has_work:
            self._engine.step()
        return figures

    def _is_over(self) -> bool:
        if math.isinf(self._give_up_s) or self._num_steps % LOOK_EVERY:
            return False
        return self._latency_s() >= self._give_up_s

    def _latency_s(self) -> float:
        until_s = np.minimum(self._end_s, self._clock.now_s)
        return float(np.mean(np.maximum(0.0, until_s - self._due_s) / self._num_outputs))

    def _admit(self) -> None:
        now_s = self._clock.now_s
        while self._coming and self._due_s[self._coming[0]] <= now_s:
            self._queue.append(self._coming.popleft())
        if self._max_batch is None:
            while self._queue:
                number = self._queue.popleft()
                self._add(number, *self._wanted_of(number))
        elif self._queue and not self._engine.has_work:
            self._add_batch(self._max_batch)

    def _add_batch(self, max_batch: int) -> None:
        """Form a batch of the earliest requests; stop before padding would exceed the maximum length."""
        batch: list[int] = []
        longest_prompt = longest_output = 0
        while self._queue and len(batch) < min(max_batch, self._bench.max_num_seqs):
            num_prompt, num_output = self._wanted_of(self._queue[0])
            padded = max(longest_prompt, num_prompt), max(longest_output, num_output)
            if sum(padded) > self._bench.pool.max_model_len:
                break
            longest_prompt, longest_output = padded
            batch.append(self._queue.popleft())
        for number in batch:
            self._add(number, longest_prompt, longest_output)

    def _wanted_of(self, number: int) -> tuple[int, int]:
        request = self._requests[number]
        return request.num_prompt_tokens, request.num_output_tokens

    def _add(self, number: int, num_prompt: int, num_output: int) -> None:
        prompt = tuple(self._random.integers(0, self._bench.vocab_size, num_prompt).tolist())
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        self._engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=params))

    def _hear(self) -> None:
        now_s = self._clock.now_s
        for output in self._engine.drain_request_outputs():
            number = int(output.request_id)
            if output.num_output_tokens <= self._requests[number].num_output_tokens:
                self._new_tokens += sum(len(part.token_ids) for part in output.parts)
            if output.end is not None:
                self._end_s[number] = now_s
                self._num_ended += 1

    def _watch(self, plan: StepPlan) -> None:
        self._num_steps += 1
        if self._num_steps % LOOK_EVERY:
            return
        self._book()
        running = {sequence: sequence.num_computed_tokens for sequence in self._engine.running}
        running |= {chunk.sequence: chunk.end for chunk in plan.chunks}
        bench = self._bench
        num_waiting = self._engine.stats().num_waiting + len(self._queue)
        is_short = num_waiting > 0 and len(running) < bench.max_num_seqs
        look = look_at(running, self._kv, bench.pool.num_slots, self._lengths, is_short=is_short)
        is_loaded = num_waiting > 0 and self._num_ended >= WARM_SHARE * len(self._requests)
        self._seen = _Seen(self._clock.now_s, look, is_loaded)

    def _book(self) -> None:
        if self._seen is not None:
            seconds = self._clock.now_s - self._seen.at_s
            self._ledger.add(self._seen.look, seconds)
            if self._seen.is_loaded:
                self._loaded.add(self._seen.look, seconds)
                self._loaded_tokens += self._new_tokens
        self._seen, self._new_tokens = None, 0

    def _figures(self) -> ReplayFigures:
        is_done = np.isfinite(self._end_s)
        total_s = float(self._end_s.max()) if is_done.all() else self._clock.now_s
        num_tokens = int(np.dot(is_done, self._num_outputs))
        loaded_s = self._loaded.seconds
        ledger = self._loaded if loaded_s else self._ledger
        return ReplayFigures(
            policy=self._policy.name,
            rate=self._rate,
            num_requests=len(self._requests),
            total_s=total_s,
            requests_per_s=self._num_ended / total_s,
            output_tokens_per_s=num_tokens / total_s,
            normalized_latency_s=self._latency_s(),
            is_given_up=not is_done.all(),
            loaded_s=loaded_s,
            loaded_tokens_per_s=self._loaded_tokens / loaded_s if loaded_s else num_tokens / total_s,
            mean_running=ledger.mean_running,
            peak_running=ledger.peak_running,
            use=ledger.use(),
            num_preemptions=self._engine.stats().num_preemptions,
        )
