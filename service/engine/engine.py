"""Engine loop: plan a step, launch it, and process the previous one meanwhile."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from service.engine.adapters import Adapters
from service.engine.beam_search import BeamGroup
from service.engine.grammars import Grammars
from service.engine.kv.block_pool import BlockPool, render_blocks
from service.engine.kv.table_view import TableView, view_tables
from service.engine.output_processor import EngineOutput, OutputProcessor, RequestOutput, iter_request_outputs
from service.engine.request import EngineRequest
from service.engine.scheduling.scheduler import Scheduler
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.stats import EngineStats, collect_stats
from service.engine.step import FinishedTransfer, StepPlan, StepResult
from service.errors import EndReason
from service.observability.buckets import STEP_TOKEN_BUCKETS, Buckets
from service.observability.logs import fields

log = logging.getLogger("quire.engine")

SLOW_STEP_S = 0.05
"""Longer steps are logged at level debug."""
COMPILE_WAIT_S = 0.01
"""Commands are read between waits."""


class Executor(Protocol):
    """Executor of plans, in order."""

    @property
    def num_host_blocks(self) -> int:
        """Host blocks ready so far; may grow."""

    @property
    def runs_ahead(self) -> bool:
        """True if a step may be launched before the previous one is collected."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the plan; return a handle for `sample` and `collect`."""

    def transfer(self, plan: StepPlan) -> None:
        """Start a plan without chunks."""

    def sample(self, launched: Any) -> None:
        """Sample sequences that need previous tokens, before the next launch."""

    def collect(self, launched: Any) -> StepResult:
        """Wait for a sampled step, in launch order."""

    def finished_transfers(self) -> list[FinishedTransfer]:
        """Return newly finished transfers, in order per direction."""

    def wait_for_transfer(self) -> None:
        """Wait for one transfer in flight."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    plan: StepPlan
    launched: Any
    launched_at_s: float
    num_recomputed_tokens: int


class Engine:
    """Owner of scheduler, KV cache and executor. Not thread-safe: used by one thread."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ):
        """Without `grammars`, requests with a grammar end with GRAMMAR; without `adapters`, those with an adapter end
        with ADAPTER."""
        self._adapters = adapters
        self._grammars = grammars
        self._executor = executor
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._limits = scheduler.limits
        self._eos_token_ids = eos_token_ids
        self.speculation = scheduler.speculation
        self._output_processor = OutputProcessor(scheduler, scheduler.kv)
        self._in_flight: deque[InFlightStep] = deque()
        self._num_steps = 0
        self._iteration_tokens = Buckets(STEP_TOKEN_BUCKETS)
        self._last_step_s = self._collected_at_s = 0.0

    @property
    def num_free_tokens(self) -> int:
        """Capacity of the available blocks, in tokens. Callable from any thread."""
        return self._kv.pool.num_available * self._kv.block_size

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, oldest first."""
        return tuple(self._scheduler.running)

    @property
    def pool(self) -> BlockPool:
        """GPU blocks; read-only."""
        return self._kv.pool

    @property
    def has_work(self) -> bool:
        return bool(self._output_processor.open_groups or self._in_flight or self._num_transfers)

    @property
    def _num_transfers(self) -> int:
        return 0 if self._kv.host is None else self._kv.host.num_transfers_in_flight

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. It ends at once if it can never fit (TOO_LARGE), the model lacks a head (INVALID), or its
        history is complete."""
        outputs = self._output_processor
        if request.request_id in outputs.open_groups:
            raise ValueError(f"request {request.request_id} is already here")
        kind = SequenceGroup if request.sampling.beam is None else BeamGroup
        longest = len(request.prompt) + request.sampling.max_tokens
        group = kind(request, self._eos_token_ids, self._limits.first_rope_row(longest))
        refusal = self._refusal(group)
        if refusal is not None:
            outputs.emit(group, (), refusal)
            return
        outputs.open_groups[request.request_id] = group
        self._scheduler.add_group(group)
        for sequence in group.branches:
            if sequence.end is not None:
                outputs.end_branch(sequence, (), (), sequence.end, already_sent=True)
            elif sequence.num_output_tokens:
                reason = sequence.end_after(sequence.token_ids[-1])
                if reason is not None:
                    outputs.end_branch(sequence, (), (), reason)
        if request.sampling.is_masked and self._grammars is not None and group.live:
            self._grammars.start_compiling(group)
        if request.adapter is not None and self._adapters is not None and group.live:
            self._adapters.start_loading(group, request.adapter)

    def _refusal(self, group: SequenceGroup) -> EndReason | None:
        request = group.request
        if not self._can_hold(group):
            return EndReason.TOO_LARGE
        if not self._limits.generates and request.sampling.pooling is None:
            return EndReason.INVALID
        if request.sampling.is_masked and self._grammars is None:
            return EndReason.GRAMMAR
        if request.adapter is not None and self._adapters is None:
            log.error("adapter not loaded %s", fields(name=request.adapter.name, error="no --enable-lora"))
            return EndReason.ADAPTER
        return None

    def cancel(self, request_id: str, reason: EndReason, branch: int | None = None) -> None:
        """End a request or branch. Unknown requests and single beams are ignored."""
        group = self._output_processor.open_groups.get(request_id)
        if group is None:
            return
        if branch is None:
            self._output_processor.end_group(group, reason)
        elif not isinstance(group, BeamGroup):
            for sequence in group.live:
                if sequence.branch == branch:
                    self._output_processor.end_branch(sequence, (), (), reason)

    def cancel_all(self, reason: EndReason) -> None:
        for request_id in list(self._output_processor.open_groups):
            self.cancel(request_id, reason)

    def step(self) -> None:
        """Launch a step, then process the previous one while the device computes.

        A launched step may still compute a sequence whose blocks were freed: the blocks' next owner writes later.
        """
        if not self._in_flight:
            self._collected_at_s = time.perf_counter()
        elif self.speculation is not None:
            self._collect_steps(int(not self.speculation.needs_known_tokens(self._scheduler.running)))
        start_s = time.perf_counter()
        self._collect_transfers()
        if self._grammars is not None:
            self._admit_compiled(self._grammars)
        if self._adapters is not None:
            self._admit_loaded(self._adapters)
        plan = self._scheduler.schedule()
        if self._adapters is not None:
            self._adapters.start_writes()
        if plan.chunks:
            launch_s = time.perf_counter()
            launched = self._executor.launch(plan)
            launched_s = time.perf_counter()
            num_recomputed_tokens = self._mark_computed(plan)
            self._in_flight.append(InFlightStep(plan, launched, start_s, num_recomputed_tokens))
            self._num_steps += 1
            self._collect_steps(1)
            self._executor.sample(launched)
        else:
            if plan.copies or plan.swap_outs or plan.swap_ins:
                self._executor.transfer(plan)
            self._wait_for_work()
        self._collect_steps(1 if plan.chunks and self._executor.runs_ahead else 0)
        if self.speculation is not None:
            self.speculation.learn()
        self._last_step_s = time.perf_counter() - start_s
        if self._last_step_s > SLOW_STEP_S and plan.chunks and log.isEnabledFor(logging.DEBUG):
            self._log_slow_step(plan, launch_s - start_s, launched_s - launch_s)

    def _mark_computed(self, plan: StepPlan) -> int:
        """Advance the launched sequences; return the number of recomputed tokens."""
        for sequence in plan.sampled_sequences:
            sequence.num_pending_tokens += 1
        num_recomputed_tokens = 0
        for sequence, start, length, _, drafts in plan.chunks:
            end = start + length
            if drafts:  # counted once accepted
                end -= len(drafts)
            sequence.num_computed_tokens = end
            if start < sequence.num_tokens_before_preemption:
                num_recomputed_tokens += min(end, sequence.num_tokens_before_preemption) - start
            if sequence.prefix_followers:
                self._scheduler.fork_followers(sequence)
        return num_recomputed_tokens

    def _log_slow_step(self, plan: StepPlan, schedule_s: float, launch_s: float) -> None:
        log.debug(
            "slow step %s",
            fields(
                ms=round(1e3 * self._last_step_s, 1),
                schedule_ms=round(1e3 * schedule_s, 1),
                launch_ms=round(1e3 * launch_s, 1),
                sequences=len(plan.chunks),
                tokens=plan.num_tokens,
                copies=len(plan.copies),
                swap_outs=len(plan.swap_outs),
                swap_ins=len(plan.swap_ins),
            ),
        )

    def drain_outputs(self) -> list[EngineOutput]:
        return self._output_processor.drain_outputs()

    def drain_request_outputs(self) -> list[RequestOutput]:
        """Return `drain_outputs` with one output per token."""
        return list(iter_request_outputs(self.drain_outputs()))

    def stats(self) -> EngineStats:
        return collect_stats(
            self._kv,
            self._scheduler,
            self._output_processor,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            iteration_tokens=self._iteration_tokens.values,
        )

    def render_blocks(self) -> bytes:
        return render_blocks(self._kv.pool, [(one.request_id, one.block_table) for one in self._scheduler.running])

    def view_tables(self) -> tuple[TableView, ...]:
        drafts = {} if self.speculation is None else self.speculation.last_drafts
        return view_tables(self._kv, self._scheduler.running, drafts)

    def render_host_blocks(self) -> bytes:
        """Render host blocks; empty without any."""
        host = self._kv.host
        if host is None:
            return b""
        return render_blocks(
            host.pool, [(one.request_id, held) for one, held in host.pinned.items()], host.blocks_being_filled
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if bookkeeping disagrees."""
        self._scheduler.check_invariants()
        if not self.has_work:
            self.check_idle()

    def check_idle(self) -> None:
        """Raise AssertionError if work or held blocks are left; cheap."""
        if self.has_work or self._kv.pool.num_used or (self._kv.host is not None and self._kv.host.pool.num_used):
            raise AssertionError("idle, and blocks are held")

    def _wait_for_work(self) -> None:
        if self._in_flight:
            return
        if self._num_transfers:
            self._executor.wait_for_transfer()
        elif self._adapters is not None and self._adapters.is_loading:
            self._adapters.wait(COMPILE_WAIT_S)
        elif self._grammars is not None:
            self._grammars.wait(COMPILE_WAIT_S)

    def _collect_transfers(self) -> None:
        host = self._kv.host
        if host is None:
            return
        host.pool.grow(self._executor.num_host_blocks)
        for done in self._executor.finished_transfers():
            self._kv.complete_transfer(done)
            self._scheduler.preemption.on_transfer(done)

    def _can_hold(self, group: SequenceGroup) -> bool:
        longest = group.num_prompt_tokens + group.request.sampling.max_tokens
        return (
            group.num_prompt_tokens > 0
            and longest <= self._limits.max_model_len
            and len(group.branches) <= self._limits.max_num_seqs
            and group.max_num_blocks(self._kv.block_size) <= self._kv.pool.num_blocks
        )

    def _admit_compiled(self, grammars: Grammars) -> None:
        for group, is_good in grammars.drain_ready():
            if not is_good and group.live:
                self._output_processor.end_group(group, EndReason.GRAMMAR)
            for sequence in group.live:
                if sequence.matcher is not None and sequence.matcher.is_finished:
                    self._output_processor.end_branch(sequence, (), (), EndReason.STOP)

    def _admit_loaded(self, adapters: Adapters) -> None:
        for group, is_good in adapters.drain_loaded():
            if not is_good and group.live:
                self._output_processor.end_group(group, EndReason.ADAPTER)
        adapters.finish_writes()

    def _collect_steps(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            result = self._executor.collect(step.launched)
            now_s = time.perf_counter()
            busy_s = now_s - max(step.launched_at_s, self._collected_at_s)
            self._scheduler.preemption.on_step(step.plan, busy_s, step.num_recomputed_tokens)
            if self.speculation is not None:
                has_overlapped = step.launched_at_s < self._collected_at_s or not self._executor.runs_ahead
                self.speculation.on_step(step.plan, now_s - self._collected_at_s, has_overlapped)
                self.speculation.on_result(step.plan, result)
            self._collected_at_s = now_s
            self._kv.commit_step(step.plan.chunks, {step.plan.sampled_sequences[index] for index in result.failed})
            num_before = self._output_processor.num_tokens
            self._output_processor.process_step(step.plan.sampled_sequences, result)
            self._iteration_tokens.observe(self._output_processor.num_tokens - num_before)
