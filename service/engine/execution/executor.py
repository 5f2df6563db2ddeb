"""Executes a plan: all chunks as one batch through the model, and a token for each sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from model.batch import Batch
from model.cuda_graphs import StepGraphs, StepInputs
from model.families.llama import Llama
from model.ops.host_blocks import HostBlocks, Transfer
from model.ops.interface import Array
from service.engine.execution.decode_batch import BatchLayout, DecodeBatch
from service.engine.execution.pooling import PendingPool, Pooler
from service.engine.execution.prompt_logprobs import (
    PendingLogprobs,
    finish_prompt_logprobs,
    padded_rows,
    start_prompt_logprobs,
)
from service.engine.execution.sampling import SampleBatch, SampleCall, StepSampler, collect_result
from service.engine.step import BlockCopy, FinishedTransfer, StepPlan, StepResult


@dataclass(slots=True)
class LaunchedStep:
    """A launched step; it has at least one sample call once it is sampled."""

    batch: SampleBatch
    logits: Array | None  # a row for each chunk with samplers, until it is sampled
    context_lens: Array | None  # of the rows, if their buffer stays the same
    scratch: ExitStack  # memory of the logits
    calls: list[SampleCall]
    prompt_logprobs: list[PendingLogprobs]
    pools: list[PendingPool]


class ModelExecutor:
    """Owns a model's buffers for steps of at most `max_num_seqs` sequences of at most `max_blocks` blocks. On a GPU it
    runs ahead: sampled ids stay on the device for the next step. `attach` adds the cache once the remaining memory is
    known."""

    def __init__(self, model: Llama, eos_token_ids: frozenset[int], max_num_seqs: int, max_blocks: int):
        self.model = model
        self._ops = model.ops
        self._pooler = Pooler(model.ops)
        self._sampler = StepSampler(model, eos_token_ids, max_num_seqs)
        self._sizes = max_num_seqs, max_blocks
        self._logit_sizes = model.ops.linear_sizes(max_num_seqs)
        self.kv: Array | None = None
        self.host: HostBlocks | None = None
        self._swap_outs: deque[tuple[int, Transfer]] = deque()  # (num_blocks, transfer)
        self._swap_ins: deque[tuple[int, Transfer]] = deque()
        self.runs_ahead = model.ops.name == "cuda"
        self._graphs = StepGraphs(model, self._sampler.sampled, max_num_seqs, max_blocks) if self.runs_ahead else None

    def attach(self, kv: Array, *, num_host_blocks: int = 0, progress: bool = False) -> None:
        """Use this cache [num_blocks, L, 2, Hkv, B, D], and `num_host_blocks` blocks on the host."""
        self.kv = kv
        self._rows = DecodeBatch(*self._sizes, block_size=kv.shape[4])
        if self._graphs is not None:
            self._graphs.capture(kv, progress=progress)
        if num_host_blocks:  # last: pinning would slow down the rest of the start
            self.host = self._ops.host_blocks(kv, num_host_blocks)

    def fit_prompts(self, num_decodes: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` prompt tokens a step should take besides its decodes while others wait."""
        return num_tokens if self._graphs is None else self._graphs.fit(num_decodes, num_tokens)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See service.engine.engine.Executor."""
        scratch = ExitStack()
        scratch.enter_context(self._ops.scratch())
        self.transfer(plan)
        layout = self._rows.lay_out(plan, self._sampler.other_rows)
        batch = self._sampler.batch_for(layout)
        launched = LaunchedStep(batch, None, None, scratch, [], [], [])
        if plan.logprob_spans or plan.pool_spans:
            self._forward_with_hidden(layout, launched)
        else:
            self._forward(layout, launched)
        if not batch.needs_previous_tokens:
            self._sample_all(launched, masked=False)
        return launched

    def transfer(self, plan: StepPlan) -> None:
        """See service.engine.engine.Executor."""
        if plan.copies:
            self._copy(plan.copies)
        if plan.swap_outs:
            self._swap_outs.append((len(plan.swap_outs), self.host.copy_out(*zip(*plan.swap_outs, strict=True))))
        if plan.swap_ins:
            self._swap_ins.append((len(plan.swap_ins), self.host.copy_in(*zip(*plan.swap_ins, strict=True))))

    def sample(self, launched: LaunchedStep) -> None:
        """See service.engine.engine.Executor. The forward pass hides the host's work here."""
        if launched.logits is not None:
            self._sample_all(launched, masked=True)

    def _sample_all(self, launched: LaunchedStep, *, masked: bool) -> None:
        with launched.scratch:
            launched.calls = self._sampler.sample(launched.logits, launched.batch, launched.context_lens, masked=masked)
            launched.logits = None

    def collect(self, launched: LaunchedStep) -> StepResult:
        """See service.engine.engine.Executor."""
        result = collect_result(launched.calls, launched.batch)
        return replace(
            result,
            prompt_logprobs=finish_prompt_logprobs(launched.prompt_logprobs),
            pooled=self._pooler.finish(launched.pools),
        )

    @property
    def num_host_blocks(self) -> int:
        """See service.engine.engine.Executor."""
        return 0 if self.host is None else self.host.num_ready

    def finished_transfers(self) -> list[FinishedTransfer]:
        """See service.engine.engine.Executor."""
        finished = []
        for is_out, flights in ((True, self._swap_outs), (False, self._swap_ins)):
            while flights and flights[0][1].is_done():
                num_blocks, transfer = flights.popleft()
                finished.append(FinishedTransfer(is_out, num_blocks, transfer.seconds()))
        return finished

    def wait_for_transfer(self) -> None:
        """See service.engine.engine.Executor."""
        (self._swap_ins or self._swap_outs)[0][1].wait()

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        for together in _independent(copies):
            sources, targets = (np.array(ids, np.int32) for ids in zip(*together, strict=True))
            self._ops.copy_blocks(self.kv, *self._ops.upload_all([sources, targets]))

    def _forward(self, layout: BatchLayout, launched: LaunchedStep) -> None:
        """Run the forward pass, as a captured graph if there is one of its size."""
        inputs = layout.inputs
        if self._graphs is not None:
            launched.logits = self._graphs.forward(inputs)
            launched.context_lens = self._graphs.context_lens(inputs.num_decodes)
        if launched.logits is None:
            launched.context_lens = None
            launched.logits = self.model.forward(self._batch(inputs), self.kv)[: len(inputs.logit_rows)]

    def _forward_with_hidden(self, layout: BatchLayout, launched: LaunchedStep) -> None:
        """Like `_forward`, with prompt log-probabilities and pooling. Never a captured graph, which keeps only
        logits."""
        batch = self._batch(layout.inputs)
        hidden = self.model.hidden(batch, self.kv)
        plan = replace(layout.plan, chunks=layout.chunks)
        launched.prompt_logprobs = start_prompt_logprobs(self.model, hidden, plan, self._sizes[0], self._logit_sizes)
        launched.pools = self._pooler.start(hidden, plan)
        launched.logits = self.model.logits(hidden, batch.logit_rows)[: len(layout.inputs.logit_rows)]

    def _batch(self, inputs: StepInputs) -> Batch:
        """Upload the step and insert pending tokens; logit rows are padded."""
        tables = inputs.block_tables(np.arange(inputs.num_decodes), self.kv.shape[4])
        hosts = (
            inputs.token_ids,
            inputs.pending_token_row,
            inputs.positions,
            inputs.slots,
            tables,
            inputs.context_lens,
            inputs.query_start,
            padded_rows(inputs.logit_rows, self._logit_sizes),
        )
        token_ids, pending_token_row, positions, slots, tables, context_lens, starts, logit_rows = self._ops.upload_all(
            hosts
        )
        self._ops.pick_tokens(token_ids, self._sampler.sampled, pending_token_row)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            context_lens=context_lens,
            query_start=starts,
            logit_rows=logit_rows,
            num_decodes=inputs.num_decodes,
            num_tokens=len(inputs.token_ids),
            num_sequences=len(inputs.context_lens),
            max_query_len=int(inputs.chunk_lens.max(initial=0)),
        )


def _independent(copies: Iterable[BlockCopy]) -> list[list[BlockCopy]]:
    """Split the copies, in order, into runs in which no target is a source or occurs twice. Nearly always one run: only
    blocks of a sequence preempted during planning occur twice."""
    runs: list[list[BlockCopy]] = [[]]
    seen_sources, seen_targets = set(), set()
    for copy in copies:
        if copy.target in seen_sources or copy.target in seen_targets or copy.source in seen_targets:
            runs.append([])
            seen_sources, seen_targets = set(), set()
        runs[-1].append(copy)
        seen_sources.add(copy.source)
        seen_targets.add(copy.target)
    return runs
