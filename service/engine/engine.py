"""The engine: requests in, tokens out, one step at a time. Plain Python; the arrays live behind the executor."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from service.engine.kv_manager import KVManager
from service.engine.plan import SampledToken, StepPlan, StepResult, TokenLogprob
from service.engine.scheduler import Limits, Scheduler
from service.engine.sequence import BRANCH, Request, Sequence, State
from service.errors import EndReason


class Executor(Protocol):
    """Carries plans out, in the order given."""

    runs_ahead: bool
    """Whether a step may be launched before the one before it was collected: its pending tokens never leave the device.
    """

    def launch(self, plan: StepPlan) -> Any:
        """Start to compute the plan's chunks and to sample where they reach their sequence's end; for `collect`."""

    def collect(self, launched: Any) -> StepResult:
        """Wait for a launched step. Each is collected once, in the order of launching."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way."""

    plan: StepPlan
    launched: Any


class BranchOutput(NamedTuple):
    """What one branch has to tell: a new token, or its end, or both."""

    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # as many as tokens where the request wants or ranks by them, else none
    end: EndReason | None  # STOP or LENGTH: nothing of this branch follows


class Output(NamedTuple):
    """Something a request's sender should hear: news of its branches, or the end, or both."""

    request_id: str
    parts: tuple[BranchOutput, ...]
    end: EndReason | None  # of the whole request: once, in its last output
    choices: tuple[int, ...]  # with an end that is a success: the n branches to answer with, best first
    num_prompt_tokens: int
    num_output_tokens: int  # of all branches
    num_cached_tokens: int  # of the prompt, found in the prefix cache


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A picture of the engine between two steps; counters run since its start."""

    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_used: int
    num_slots_held: int
    num_slots_filled: int
    num_steps: int
    last_step_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int


class Engine:
    """Not thread-safe: one thread owns it."""

    def __init__(self, executor: Executor, kv: KVManager, limits: Limits, eos_token_ids: frozenset[int]):
        self._executor = executor
        self._kv = kv
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._scheduler = Scheduler(kv, limits)
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[Output] = []
        self._flights: deque[_Flight] = deque()
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._last_step_s = 0.0

    @property
    def num_waiting(self) -> int:
        """May be read from other threads."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold blocks, the oldest first; to look at, between two steps."""
        return tuple(self._scheduler.running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._flights)

    def add(self, request: Request) -> None:
        """Queue a request. One that this engine could never finish ends at once with TOO_LARGE."""
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already here")
        sequence = Sequence(request)
        if not request.prompt or sequence.num_prompt_tokens + request.sampling.max_tokens > self._limits.max_model_len:
            self._emit(sequence, (), (), EndReason.TOO_LARGE)
            return
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str, reason: EndReason) -> None:
        """End a request now; its blocks are free before the next step. Unknown and ended ones are left alone."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, (), (), reason)

    def cancel_all(self, reason: EndReason) -> None:
        for request_id in list(self._sequences):
            self.cancel(request_id, reason)

    def step(self) -> None:
        """Schedule and launch a step, settle the one before: the host works while the device does.

        What is settled waits in the outbox. Blocks of a sequence that ends while a later step still computes it are
        free at once: whoever gets them writes in a later step yet, and the device runs steps one after the other.
        """
        start_s = time.perf_counter()
        if not self._may_run_ahead():
            self._settle_flights(0)
        plan = self._scheduler.schedule()
        if plan.chunks:
            self._flights.append(_Flight(plan, self._executor.launch(plan)))
            for sequence, start, length, samples in plan.chunks:
                sequence.num_computed_tokens = start + length
                sequence.num_pending_tokens += samples
            self._num_steps += 1
        self._settle_flights(1 if plan.chunks and self._executor.runs_ahead else 0)
        self._last_step_s = time.perf_counter() - start_s

    def take_outputs(self) -> list[Output]:
        """Everything since the last call, in order."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def stats(self) -> EngineStats:
        held, filled = self._kv.num_slots(self._scheduler.running)
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks_free=self._kv.pool.num_free,
            num_blocks_cached=self._kv.pool.num_cached,
            num_blocks_used=self._kv.pool.num_used,
            num_slots_held=held,
            num_slots_filled=filled,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self._scheduler.preemption.num_preemptions,
        )

    def check_invariants(self) -> None:
        """All books agree; an engine without requests holds no block."""
        self._scheduler.check_invariants()
        if not self._sequences and self._kv.pool.num_used:
            raise AssertionError("idle, and blocks are held")

    def _may_run_ahead(self) -> bool:
        """Penalties need every token by its id, the pending ones too."""
        return not any(sequence.has_penalties for sequence in self._scheduler.running)

    def _settle_flights(self, num_left: int) -> None:
        while len(self._flights) > num_left:
            flight = self._flights.popleft()
            result = self._executor.collect(flight.launched)
            due = [chunk.sequence for chunk in flight.plan.chunks if chunk.samples]
            failed = {sequence for sequence, token in zip(due, result.sampled, strict=True) if token.is_nan}
            self._kv.settle(flight.plan.chunks, failed)
            for sequence, sampled in zip(due, result.sampled, strict=True):
                sequence.num_pending_tokens -= 1
                if sequence.state is not State.ENDED:
                    self._append(sequence, sampled)

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        if sequence.num_output_tokens == 0:
            self._num_prompt_tokens += sequence.num_prompt_tokens
        if sampled.is_nan:
            self._end(sequence, (), (), EndReason.NUMERICAL_ERROR)
            return
        sequence.token_ids.append(sampled.token_id)
        self._num_output_tokens += 1
        tokens = (sampled.token_id,)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        reason = sequence.end_after(sampled.token_id, self._eos_token_ids)
        if reason is None:
            self._emit(sequence, tokens, logprobs, None)
        else:
            self._end(sequence, tokens, logprobs, reason)

    def _end(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], reason: EndReason
    ) -> None:
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        self._emit(sequence, tokens, logprobs, reason)

    def _emit(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], end: EndReason | None
    ) -> None:
        good_end = end if end in (EndReason.STOP, EndReason.LENGTH) else None
        parts = (BranchOutput(BRANCH, tokens, logprobs, good_end),) if tokens or good_end else ()
        choices = (BRANCH,) if good_end else ()
        counts = (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_cached_tokens or 0)
        self._outbox.append(Output(sequence.request_id, parts, end, choices, *counts))
