"""Carries a plan out: the plan's chunks as one batch through the model, a token for each sequence that is due one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from model.batch import Batch
from model.llama import Llama
from model.ops.interface import Array, HostBlocks, Ops, Sampled, Transfer
from model.sampler import SampledRows, sampling_arrays
from model.step_graphs import StepGraphs, StepInputs
from service.engine.grammars import MaskBuilder
from service.engine.plan import BlockCopy, Chunk, FinishedTransfer, StepPlan, StepResult, TokenLogprob
from service.engine.pooling import Pooler, PoolFlight
from service.engine.prompt_scores import ScoreFlight, begin_scores, scored_tokens
from service.engine.sequence import Sequence


class _Draw(NamedTuple):
    """Sequences that get their tokens from one call of `Ops.sample`, and what waits for its arrays."""

    samplers: list[Sequence]
    arrive: Callable[[], list[np.ndarray]]


@dataclass(slots=True)
class _Launched:
    """A step on its way: the sequences that get a token, and how they get it; one draw at least, once it is drawn."""

    plan: StepPlan
    samplers: list[Sequence]
    logits: Array | None  # a row for each chunk that has samplers, until they are drawn from
    scratch: ExitStack  # the memory that the logits may live in
    draws: list[_Draw]
    scores: list[ScoreFlight]
    pools: list[PoolFlight]


class ModelExecutor:
    """Owns a model's buffers for steps of at most `max_num_seqs` sequences of at most `max_blocks` blocks.

    On a GPU it runs ahead: what a step samples stays in `_sampled` for the next one, whose host side needs only to know
    from which row. The cache comes with `attach`, once the memory that all else leaves is known.
    """

    def __init__(self, model: Llama, eos_token_ids: frozenset[int], max_num_seqs: int, max_blocks: int):
        self.model = model
        self._ops = model.ops
        self._eos_token_ids = eos_token_ids
        self._pooler = Pooler(model.ops)
        self._masks = MaskBuilder(model.config.vocab_size)
        self._sampled = model.ops.empty((max_num_seqs,), np.dtype(np.int32))
        self._sampled_rows: dict[object, int] = {}
        self._no_source = max_num_seqs
        self.kv: Array | None = None
        self.host: HostBlocks | None = None
        self._outs: deque[tuple[int, Transfer]] = deque()  # with how many blocks
        self._ins: deque[tuple[int, Transfer]] = deque()
        self.runs_ahead = model.ops.name == "cuda"
        self._graphs = StepGraphs(model, self._sampled, max_num_seqs, max_blocks) if self.runs_ahead else None

    def attach(self, kv: Array, *, num_host_blocks: int = 0, progress: bool = False) -> None:
        """Work on this cache [num_blocks, L, 2, Hkv, B, D] from now on, with so many blocks on the host beside it."""
        self.kv = kv
        self._block_size = kv.shape[4]
        if self._graphs is not None:
            self._graphs.capture(kv, progress=progress)
        if num_host_blocks:  # last: pinning would slow down what else a start does
            self.host = self._ops.host_blocks(kv, num_host_blocks)

    def fit_prompts(self, num_decodes: int, num_tokens: int) -> int:
        """How many of so many prompt tokens a step should take beside its decodes, if others are waiting anyway."""
        return num_tokens if self._graphs is None else self._graphs.fit(num_decodes, num_tokens)

    def launch(self, plan: StepPlan) -> _Launched:
        """See service.engine.engine.Executor."""
        samplers, scratch = plan.samplers, ExitStack()
        scratch.enter_context(self._ops.scratch())
        self.move(plan)
        wants_hidden = plan.scores or plan.pools
        logits, scores, pools = self._with_hidden(plan) if wants_hidden else (self._forward(plan.chunks), [], [])
        launched = _Launched(plan, samplers, logits, scratch, [], scores, pools)
        if not any(map(attrgetter("draws_late"), samplers)):
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
            launched.draws = self._draws(launched.logits, launched.plan.chunks, launched.samplers, masked)
            launched.logits = None
        if launched.samplers:
            self._sampled_rows = {sequence: row for row, sequence in enumerate(launched.draws[0].samplers)}

    def collect(self, launched: _Launched) -> StepResult:
        """See service.engine.engine.Executor."""
        results = [_result(samplers, arrive()) for samplers, arrive in launched.draws]
        told = {"scored": scored_tokens(launched.scores), "pooled": self._pooler.finish(launched.pools)}
        if len(results) == 1:
            return replace(results[0], **told)
        drawn = [sequence for draw in launched.draws for sequence in draw.samplers]
        tokens = dict(zip(drawn, chain.from_iterable(result.one_by_one() for result in results), strict=True))
        return replace(StepResult.of(tokens[sequence] for sequence in launched.samplers), **told)

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

    def _forward(self, chunks: tuple[Chunk, ...]) -> Array:
        """Logits of the chunks that sample, in order."""
        inputs = _step_inputs(chunks, self._block_size, self._sampled_rows, self._no_source)
        logits = None if self._graphs is None else self._graphs.forward(inputs)
        if logits is not None:
            return logits
        return self.model.forward(self._batch(inputs), self.kv)

    def _batch(self, inputs: StepInputs) -> Batch:
        batch, source = _upload(inputs, self._ops)
        self._ops.pick_tokens(batch.token_ids, self._sampled, source)
        return batch

    def _with_hidden(self, plan: StepPlan) -> tuple[Array, list[ScoreFlight], list[PoolFlight]]:
        """As `_forward`, with scores and pools; never a captured size, which keeps no more than its logits."""
        batch = self._batch(_step_inputs(plan.chunks, self._block_size, self._sampled_rows, self._no_source))
        hidden = self.model.hidden(batch, self.kv)
        scores = begin_scores(self.model, hidden, plan, max_rows=self._no_source)
        pools = self._pooler.begin(hidden, plan)
        return self.model.logits(hidden, batch.logit_rows), scores, pools

    def _draws(self, logits: Array, chunks: tuple[Chunk, ...], samplers: list[Sequence], masked: bool) -> list[_Draw]:
        """Sample from `logits`, a row for each chunk that has samplers.

        Beams whose log-probabilities are of adjusted logits are a draw of their own, behind the one whose tokens the
        next step may need before the host knows them.
        """
        due = [chunk for chunk in chunks if chunk[3]]
        positions = [start + length for _, start, length, mine in due for _ in mine]
        scored = any(map(attrgetter("scores_adjusted"), samplers))
        if len(due) == len(samplers) and not scored:
            return [self._draw(logits, samplers, positions, adjusted=False, masked=masked)]
        scored = [row for row, sequence in enumerate(samplers) if sequence.scores_adjusted]
        source = [row for row, chunk in enumerate(due) for _ in chunk.samplers]
        plain = sorted(set(range(len(samplers))) - set(scored))
        draws = []
        for rows, adjusted in ((plain, False), (scored, True)):
            if rows:
                picked = self._ops.upload(np.array([source[row] for row in rows], np.int32))
                own = self._ops.gather_rows(logits, picked)
                mine, at = [samplers[row] for row in rows], [positions[row] for row in rows]
                draws.append(self._draw(own, mine, at, adjusted=adjusted, masked=masked))
        return draws

    def _draw(
        self, logits: Array, samplers: list[Sequence], positions: list[int], *, adjusted: bool, masked: bool
    ) -> _Draw:
        if not samplers:
            return _Draw(samplers, self._ops.download_later(()))
        shaped = samplers if any(map(attrgetter("is_shaped"), samplers)) else []
        rows = SampledRows(
            records=[sequence.sampling_record for sequence in samplers],
            positions=np.array(positions, np.uint32),
            sampling=[sequence.sampling for sequence in shaped],
            token_ids=[sequence.token_ids for sequence in shaped],
            num_prompt_tokens=[sequence.num_prompt_tokens for sequence in shaped],
            mask=self._masks.build(samplers) if masked else None,
        )
        vocab_size, send = self.model.config.vocab_size, self._ops.upload_all
        how = sampling_arrays(rows, vocab_size, self._eos_token_ids, send, logprobs_adjusted=adjusted)
        sampled: Sampled = self._ops.sample(logits, how, out=None if adjusted else self._sampled[: len(samplers)])
        arrays = [sampled.token_ids, sampled.is_nan]
        if sampled.logprobs is not None:
            arrays += [sampled.logprobs, sampled.top_ids, sampled.top_logprobs]
        return _Draw(samplers, self._ops.download_later(arrays))


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


def _step_inputs(
    chunks: tuple[Chunk, ...], block_size: int, sampled_rows: dict[object, int], no_source: int
) -> StepInputs:
    """A step's arrays on the host. Chunks of one token come first."""
    sequences, starts, lengths, samplers = zip(*chunks, strict=True)
    starts, lengths = np.array(starts, np.int32), np.array(lengths, np.int32)
    num_decodes = int(np.count_nonzero(lengths == 1))
    ends = np.cumsum(lengths)
    row_of, positions = np.arange(len(chunks)), starts
    if num_decodes < len(chunks):
        row_of = np.repeat(row_of, lengths)
        positions = (np.arange(ends[-1]) - (ends - lengths - starts)[row_of]).astype(np.int32)
    tables = _block_tables(sequences)
    block, offset = np.divmod(positions, block_size)
    token_ids, source = _decoded_tokens(chunks[:num_decodes], sampled_rows, no_source)
    for sequence, start, length, _ in chunks[num_decodes:]:
        known = sequence.token_ids[start : start + length]
        is_pending = len(known) < length
        token_ids += [*known, 0] if is_pending else known
        source += [no_source] * length
        if is_pending:
            source[-1] = sampled_rows[sequence]
    return StepInputs(
        token_ids=np.array(token_ids, np.int32),
        source=np.array(source, np.int32),
        positions=positions,
        slots=tables[row_of, block].astype(np.int64) * block_size + offset,
        context_lens=starts + lengths,
        block_tables=tables,
        query_lens=lengths,
        logit_rows=(ends - 1)[list(map(bool, samplers))].astype(np.int32),
        num_decodes=num_decodes,
    )


def _upload(inputs: StepInputs, ops: Ops) -> tuple[Batch, Array]:
    """The batch on the backend, and for each token the row of `pick_tokens`."""
    query_lens = inputs.query_lens[inputs.num_decodes :]
    hosts = (
        inputs.token_ids,
        inputs.source,
        inputs.positions,
        inputs.slots,
        inputs.block_tables,
        inputs.context_lens,
        inputs.query_start,
        inputs.logit_rows,
    )
    token_ids, source, positions, slots, tables, context_lens, query_start, logit_rows = ops.upload_all(hosts)
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        block_tables=tables,
        context_lens=context_lens,
        query_start=query_start,
        logit_rows=logit_rows,
        num_decodes=inputs.num_decodes,
        num_tokens=len(inputs.token_ids),
        num_sequences=len(inputs.query_lens),
        max_query_len=int(query_lens.max(initial=0)),
    )
    return batch, source


def _block_tables(sequences: Iterable[Sequence]) -> np.ndarray:
    """int32[S, widest], padded with 0."""
    tables = [sequence.block_table for sequence in sequences]
    width_bytes = 4 * max(map(len, tables))
    rows = [table.tobytes().ljust(width_bytes, b"\0") for table in tables]
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(tables), -1)


def _decoded_tokens(
    decodes: Iterable[Chunk], sampled_rows: dict[object, int], no_source: int
) -> tuple[list[int], list[int]]:
    """(token ids, source) of chunks of one token: one that is pending has the row it was sampled in as its source."""
    pairs = [
        (0, sampled_rows[sequence]) if start >= len(sequence.token_ids) else (sequence.token_ids[start], no_source)
        for sequence, start, _, _ in decodes
    ]
    token_ids, source = zip(*pairs, strict=True) if pairs else ((), ())
    return list(token_ids), list(source)


def _result(samplers: list[Sequence], arrays: list[np.ndarray]) -> StepResult:
    """Of one draw, from (token ids, is NaN) and log-probabilities where anybody wants some."""
    if not samplers:
        return StepResult(())
    token_ids, is_nan, *logprobs = arrays
    told = _logprobs(samplers, *(array.tolist() for array in logprobs)) if logprobs else None
    return StepResult(token_ids.tolist(), told, frozenset(np.flatnonzero(is_nan).tolist()))


def _logprobs(samplers: list[Sequence], chosen: list, top_ids: list, top: list) -> list[TokenLogprob | None]:
    wanted = [sequence.num_alternatives for sequence in samplers]
    return [
        None if count is None else TokenLogprob(chosen[row], tuple(top_ids[row][:count]), tuple(top[row][:count]))
        for row, count in enumerate(wanted)
    ]
