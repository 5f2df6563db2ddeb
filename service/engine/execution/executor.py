"""Execution of plans; the model runner only sees arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from model.adapter_slots import AdapterSlots
from model.batch import StateRows
from model.families.llama import Llama
from model.ops.adapter_interface import AsyncWrite
from model.ops.host_blocks import HostBlocks
from model.ops.interface import Array
from model.step_inputs import StepInputs, no_blocks
from model.weights.lora.adapter import LoraAdapter
from service.engine.drafting.drafter import MAX_DRAFTS
from service.engine.execution.decode_batch import BatchLayout, DecodeBatch
from service.engine.execution.model_runner import ModelRunner, RunningStep
from service.engine.execution.pooling import Pooler
from service.engine.execution.prompt_logprobs import PlannedLogprobs, plan_prompt_logprobs, read_prompt_logprobs
from service.engine.execution.sampling import SampleBatch, SampleCall, StepSampler, read_result
from service.engine.step import BlockCopy, FinishedTransfer, PoolSpan, StepPlan, StepResult

MAX_DRAFTED_ROWS = 256
"""Maximum decode rows of a step with drafts, unless more sequences decode. Above this, bf16 GEMMs on an H200 are
compute-bound and every row adds to the time."""


@runtime_checkable
class StateReader(Protocol):
    """Draft head that continues the model's states."""

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers whose inputs it takes."""

    def read_states(self, layout: BatchLayout, states: Array) -> None:
        """Record a launched step's states [T, len(state_layers) * H]."""


@runtime_checkable
class StepFollower(Protocol):
    """Draft head that reads each step's states on the device."""

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers whose inputs it takes."""

    def follow(
        self, layout: BatchLayout, batch: SampleBatch, calls: Seq[SampleCall], rows: StateRows, sampled: Array
    ) -> None:
        """Read a step's rows; `sampled` int32[R] holds the ids from its first call."""


@dataclass(slots=True)
class LaunchedStep:
    running: RunningStep
    batch: SampleBatch
    calls: list[SampleCall]
    prompt_logprobs: list[PlannedLogprobs]
    pool_spans: tuple[PoolSpan, ...]
    layout: BatchLayout  # valid until the next launch


class ModelExecutor:
    """Executor of at most `max_num_seqs` sequences of `max_blocks` blocks; it runs ahead on a GPU. `attach` adds the
    cache once the remaining memory is known."""

    def __init__(
        self,
        model: Llama,
        eos_token_ids: frozenset[int],
        max_num_seqs: int,
        max_blocks: int,
        *,
        verifies_drafts: bool = False,
    ):
        """`verifies_drafts`: on a GPU each draft is a decode row, up to MAX_DRAFTED_ROWS per step."""
        self.model = model
        self.runs_ahead = model.ops.name == "cuda"
        self.max_rows = max_decode_rows(max_num_seqs, verifies_drafts=verifies_drafts)
        self.runner = ModelRunner(model, self.max_rows, max_blocks, verifies_drafts=verifies_drafts)
        self._sampler = StepSampler(model.config.vocab_size, eos_token_ids, keeps_params=self.runner.replays_graphs)
        self._pooler = Pooler()
        self._states: StateReader | None = None
        self._follower: StepFollower | None = None
        self._has_adapters = False
        self._sizes = max_num_seqs, max_blocks

    @property
    def kv(self) -> Array | None:
        return self.runner.kv

    @property
    def host(self) -> HostBlocks | None:
        return self.runner.host

    def attach(
        self,
        kv: Array,
        *,
        blocks: Array | None = None,
        head: StateReader | StepFollower | None = None,
        adapters: AdapterSlots | None = None,
        num_host_blocks: int = 0,
        progress: bool = False,
    ) -> None:
        """Use this cache [num_blocks, L, 2, Hkv, B, D]. Copies and swaps move `blocks` [num_blocks, ...] (default: the
        cache)."""
        sizes = self.max_rows, self._sizes[1], kv.shape[4]
        self._rows = DecodeBatch(*sizes, drafts_are_decodes=self.runs_ahead)
        self._states = head if isinstance(head, StateReader) else None
        self._follower = head if isinstance(head, StepFollower) else None
        self._has_adapters = adapters is not None
        self.runner.attach(
            kv,
            blocks=blocks,
            state_layers=() if head is None else head.state_layers,
            adapters=adapters,
            num_host_blocks=num_host_blocks,
            progress=progress,
        )

    def fit_prompts(self, num_decodes: int, num_tokens: int) -> int:
        return self.runner.fit_prompts(num_decodes, num_tokens)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        layout = self._rows.lay_out(plan, self._sampler.other_rows)
        if self._has_adapters:
            layout = replace(layout, inputs=replace(layout.inputs, adapter_slots=layout.adapter_slots()))
        prompt_logprobs, pool_rows = [], []
        if plan.logprob_spans or plan.pool_spans:
            first_rows = layout.first_rows()
            prompt_logprobs = plan_prompt_logprobs(plan.logprob_spans, first_rows, self._sizes[0])
            pool_rows = self._pooler.rows(plan.pool_spans, first_rows)
        inputs = StepInputs(
            forward=layout.inputs,
            copies=_pairs(plan.copies),
            swap_outs=_pairs(plan.swap_outs),
            swap_ins=_pairs(plan.swap_ins),
            prompt_logprobs=[planned.rows for planned in prompt_logprobs],
            pool_rows=pool_rows,
        )
        running = self.runner.launch(inputs)
        if self._states is not None and running.states is not None:
            self._states.read_states(layout, running.states.states)
        batch = self._sampler.batch_for(layout)  # while the device computes
        launched = LaunchedStep(running, batch, [], prompt_logprobs, plan.pool_spans, layout)
        if not batch.needs_previous_tokens:
            self._sample(launched, masked=False)
        return launched

    def write_adapter(self, slot: int, adapter: LoraAdapter, *, is_unused: bool = False) -> AsyncWrite:
        """Start replacing a slot's adapter, after all launched steps unless the slot `is_unused`."""
        return self.runner.write_adapter(slot, adapter, is_unused=is_unused)

    def transfer(self, plan: StepPlan) -> None:
        copies, swap_outs, swap_ins = map(_pairs, (plan.copies, plan.swap_outs, plan.swap_ins))
        self.runner.transfer(StepInputs(forward=None, copies=copies, swap_outs=swap_outs, swap_ins=swap_ins))

    def sample(self, launched: LaunchedStep) -> None:
        if not launched.calls:
            self._sample(launched, masked=True)

    def _sample(self, launched: LaunchedStep, *, masked: bool) -> None:
        calls = launched.calls = self._sampler.calls(launched.batch, masked=masked)
        then = None
        if self._follower is not None:
            then = partial(self._follower.follow, launched.layout, launched.batch, calls)
        self.runner.sample(launched.running, [call.inputs for call in calls], then)

    def collect(self, launched: LaunchedStep) -> StepResult:
        running = launched.running
        return read_result(
            launched.calls,
            launched.batch,
            [fetch() for fetch in running.samples],
            prompt_logprobs=read_prompt_logprobs(launched.prompt_logprobs, running.prompt_logprobs),
            pooled=self._pooler.read(launched.pool_spans, running.pool_rows),
        )

    @property
    def num_host_blocks(self) -> int:
        return 0 if self.host is None else self.host.num_ready

    def finished_transfers(self) -> list[FinishedTransfer]:
        return [FinishedTransfer(*done) for done in self.runner.finished_transfers()]

    def wait_for_transfer(self) -> None:
        self.runner.wait_for_transfer()


def max_decode_rows(max_num_seqs: int, *, verifies_drafts: bool) -> int:
    if not verifies_drafts:
        return max_num_seqs
    return max(max_num_seqs, min((1 + MAX_DRAFTS) * max_num_seqs, MAX_DRAFTED_ROWS))


def _pairs(copies: tuple[BlockCopy, ...]) -> np.ndarray:
    """Return int32[n, 2]."""
    return np.array(copies, np.int32) if copies else no_blocks()
