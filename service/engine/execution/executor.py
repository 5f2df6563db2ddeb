"""Carries a plan out: the plan's chunks as one batch through the model, a token for each sequence that is due one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from model.batch import Batch
from model.llama import Llama
from model.ops.host_blocks import HostBlocks, Transfer
from model.ops.interface import Array
from model.step_graphs import StepGraphs, StepInputs
from service.engine.execution.decode_batch import Arranged, DecodeRows
from service.engine.execution.pooling import Pooler, PoolFlight
from service.engine.execution.prompt_logprobs import ScoreFlight, begin_scores, padded_rows, scored_tokens
from service.engine.execution.sampling import Draw, Drawer, Due, result_of
from service.engine.step import BlockCopy, FinishedTransfer, StepPlan, StepResult


@dataclass(slots=True)
class _Launched:
    """A step on its way: the sequences that get a token, and how they get it; one draw at least, once it is drawn."""

    due: Due
    logits: Array | None  # a row for each chunk that has samplers, until they are drawn from
    context_lens: Array | None  # of the rows, where they stay in one place
    scratch: ExitStack  # the memory that the logits may live in
    draws: list[Draw]
    scores: list[ScoreFlight]
    pools: list[PoolFlight]


class ModelExecutor:
    """Owns a model's buffers for steps of at most `max_num_seqs` sequences of at most `max_blocks` blocks.

    On a GPU it runs ahead: what a step samples stays there for the next one. The cache comes with `attach`, once the
    memory that all else leaves is known.
    """

    def __init__(self, model: Llama, eos_token_ids: frozenset[int], max_num_seqs: int, max_blocks: int):
        self.model = model
        self._ops = model.ops
        self._pooler = Pooler(model.ops)
        self._drawer = Drawer(model, eos_token_ids, max_num_seqs)
        self._sizes = max_num_seqs, max_blocks
        self._logit_sizes = model.ops.linear_sizes(max_num_seqs)
        self.kv: Array | None = None
        self.host: HostBlocks | None = None
        self._outs: deque[tuple[int, Transfer]] = deque()  # with how many blocks
        self._ins: deque[tuple[int, Transfer]] = deque()
        self.runs_ahead = model.ops.name == "cuda"
        self._graphs = StepGraphs(model, self._drawer.sampled, max_num_seqs, max_blocks) if self.runs_ahead else None

    def attach(self, kv: Array, *, num_host_blocks: int = 0, progress: bool = False) -> None:
        """Work on this cache [num_blocks, L, 2, Hkv, B, D] from now on, with so many blocks on the host beside it."""
        self.kv = kv
        self._rows = DecodeRows(*self._sizes, block_size=kv.shape[4])
        if self._graphs is not None:
            self._graphs.capture(kv, progress=progress)
        if num_host_blocks:  # last: pinning would slow down what else a start does
            self.host = self._ops.host_blocks(kv, num_host_blocks)

    def fit_prompts(self, num_decodes: int, num_tokens: int) -> int:
        """How many of so many prompt tokens a step should take beside its decodes, if others are waiting anyway."""
        return num_tokens if self._graphs is None else self._graphs.fit(num_decodes, num_tokens)

    def launch(self, plan: StepPlan) -> _Launched:
        """See service.engine.engine.Executor."""
        scratch = ExitStack()
        scratch.enter_context(self._ops.scratch())
        self.move(plan)
        arranged = self._rows.arrange(plan, self._drawer.elsewhere)
        due = self._drawer.due(arranged)
        launched = _Launched(due, None, None, scratch, [], [], [])
        if plan.scores or plan.pools:
            self._begin_hidden(arranged, launched)
        else:
            self._begin(arranged, launched)
        if not due.is_late:
            self._draw_all(launched, masked=False)
        return launched

    def move(self, plan: StepPlan) -> None:
        """See service.engine.engine.Executor."""
        if plan.copies:
            self._copy(plan.copies)
        if plan.outs:
            self._outs.append((len(plan.outs), self.host.copy_out(*zip(*plan.outs, strict=True))))
        if plan.ins:
            self._ins.append((len(plan.ins), self.host.copy_in(*zip(*plan.ins, strict=True))))

    def draw(self, launched: _Launched) -> None:
        """See service.engine.engine.Executor. What the host does here, the forward pass hides."""
        if launched.logits is not None:
            self._draw_all(launched, masked=True)

    def _draw_all(self, launched: _Launched, *, masked: bool) -> None:
        with launched.scratch:
            launched.draws = self._drawer.draw(launched.logits, launched.due, launched.context_lens, masked=masked)
            launched.logits = None

    def collect(self, launched: _Launched) -> StepResult:
        """See service.engine.engine.Executor."""
        result = result_of(launched.draws, launched.due)
        return replace(result, scored=scored_tokens(launched.scores), pooled=self._pooler.finish(launched.pools))

    @property
    def num_host_blocks(self) -> int:
        """See service.engine.engine.Executor."""
        return 0 if self.host is None else self.host.num_ready

    def finished_transfers(self) -> list[FinishedTransfer]:
        """See service.engine.engine.Executor."""
        finished = []
        for is_out, flights in ((True, self._outs), (False, self._ins)):
            while flights and flights[0][1].is_done():
                num_blocks, transfer = flights.popleft()
                finished.append(FinishedTransfer(is_out, num_blocks, transfer.seconds()))
        return finished

    def wait_for_transfer(self) -> None:
        """See service.engine.engine.Executor."""
        (self._ins or self._outs)[0][1].wait()

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        for together in _independent(copies):
            sources, targets = (np.array(ids, np.int32) for ids in zip(*together, strict=True))
            self._ops.copy_blocks(self.kv, *self._ops.upload_all([sources, targets]))

    def _begin(self, arranged: Arranged, launched: _Launched) -> None:
        """The forward pass, as captured if there is a size for it."""
        inputs = arranged.inputs
        if self._graphs is not None:
            launched.logits = self._graphs.forward(inputs)
            launched.context_lens = self._graphs.context_lens(inputs.num_decodes)
        if launched.logits is None:
            launched.context_lens = None
            launched.logits = self.model.forward(self._batch(inputs), self.kv)[: len(inputs.logit_rows)]

    def _begin_hidden(self, arranged: Arranged, launched: _Launched) -> None:
        """As `_begin`, with scores and pools; never a captured size, which keeps no more than its logits."""
        batch = self._batch(arranged.inputs)
        hidden = self.model.hidden(batch, self.kv)
        plan = replace(arranged.plan, chunks=arranged.chunks)
        launched.scores = begin_scores(self.model, hidden, plan, self._sizes[0], self._logit_sizes)
        launched.pools = self._pooler.begin(hidden, plan)
        launched.logits = self.model.logits(hidden, batch.logit_rows)[: len(arranged.inputs.logit_rows)]

    def _batch(self, inputs: StepInputs) -> Batch:
        """The step on the backend, each pending token in its place; its logit rows are padded."""
        tables = inputs.block_tables(np.arange(inputs.num_decodes), self.kv.shape[4])
        hosts = (
            inputs.token_ids,
            inputs.source,
            inputs.positions,
            inputs.slots,
            tables,
            inputs.context_lens,
            inputs.query_start,
            padded_rows(inputs.logit_rows, self._logit_sizes),
        )
        token_ids, source, positions, slots, tables, context_lens, starts, logit_rows = self._ops.upload_all(hosts)
        self._ops.pick_tokens(token_ids, self._drawer.sampled, source)
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
    """The copies in their order, in runs in which no target is a source or occurs twice.

    One run nearly always: only what was preempted while the step was planned can have its blocks in it twice.
    """
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
