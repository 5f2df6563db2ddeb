from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from model.ops.interface import SamplingArrays
from model.sampler import SampledRows, sampling_arrays
from model.step_inputs import SampleInputs
from service.engine.execution.decode_batch import BatchLayout
from service.engine.grammars import MaskBuilder
from service.engine.sequence import Sequence
from service.engine.step import Chunk, PooledPrompt, PromptLogprobs, SampledToken, StepResult, TokenLogprob

NO_DRAFT = -1


@dataclass(slots=True, eq=False)
class SampleBatch:
    """Sequences that sample in a step, by row."""

    sequences: list[Sequence]
    rows: list[int]  # logit row of each sequence
    positions: np.ndarray  # int32, of the sampled tokens
    num_own_rows: int  # leading ones in their own decode rows
    indices: np.ndarray  # int64, index in `sequences` (with drafts, of the first row) for each of the plan's
    drafts: list[Seq[int]] | None = None  # drafts preceding each row
    next_drafts: Callable[[], np.ndarray] | None = None
    """Function returning int64: the draft after each row, NO_DRAFT after a run's last. It may wait."""
    unmasked: frozenset[int] = frozenset()  # rows after a draft whose matcher has failed
    needs_previous_tokens: bool = False
    has_logit_processors: bool = False  # penalties, biases or min_tokens
    has_adjusted_logprobs: bool = False
    is_kept: bool = False  # by the runner

    def __post_init__(self) -> None:
        self.needs_previous_tokens = any(map(attrgetter("needs_previous_tokens"), self.sequences))
        self.has_logit_processors = any(map(attrgetter("has_logit_processors"), self.sequences))
        self.has_adjusted_logprobs = any(map(attrgetter("has_adjusted_logprobs"), self.sequences))

    @property
    def has_one_sequence_per_row(self) -> bool:
        return not self.rows or self.rows[-1] + 1 == len(self.rows)


class SampleCall(NamedTuple):
    sequences: list[Sequence]
    inputs: SampleInputs
    indices: list[int] | None = None  # indices in the batch; None: all


class StepSampler:
    """Planner of sampling. The next step reads pending ids on the device from their own decode row, else from
    `other_rows`."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], *, keeps_params: bool):
        """`keeps_params`: the runner can keep parameters of decode-only steps."""
        self.other_rows: dict[Sequence, int] = {}
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._keeps_params = keeps_params
        self._masks = MaskBuilder(vocab_size)
        self._last: SampleBatch | None = None  # decodes only

    def batch_for(self, layout: BatchLayout) -> SampleBatch:
        """Return the sequences to sample; the same object while the same ones decode."""
        if layout.has_drafts or not layout.is_one_token_each:
            return _batch_of_chunks(layout)
        if layout.prefills or layout.plan.logprob_spans or layout.plan.pool_spans:
            return _batch_of_decodes(layout)
        if self._last is None or self._last.sequences is not layout.decodes:
            self._last = _batch_of_decodes(layout)
        self._last.positions = layout.inputs.context_lens
        return self._last

    def calls(self, batch: SampleBatch, *, masked: bool) -> list[SampleCall]:
        """Return the sampling calls. Beams with adjusted log-probabilities form a second call, as the next step does
        not need their tokens on the device."""
        if batch.has_one_sequence_per_row and not batch.has_adjusted_logprobs:
            calls = [self._call(batch, masked)]
        else:
            calls = self._split_calls(batch, masked)
        num_own = batch.num_own_rows if calls[0].sequences is batch.sequences else 0
        self.other_rows = {sequence: row for row, sequence in enumerate(calls[0].sequences[num_own:], num_own)}
        return calls

    def _split_calls(self, batch: SampleBatch, masked: bool) -> list[SampleCall]:
        scored = [index for index, sequence in enumerate(batch.sequences) if sequence.has_adjusted_logprobs]
        plain = sorted(set(range(len(batch.sequences))) - set(scored))
        calls = []
        for indices, adjusted in ((plain, False), (scored, True)):
            if indices:
                rows = np.array([batch.rows[index] for index in indices], np.int32)
                sequences, every = [batch.sequences[index] for index in indices], list(range(len(indices)))
                part = SampleBatch(sequences, every, batch.positions[indices], 0, np.array(every))
                if batch.drafts is not None:
                    part.drafts = [batch.drafts[index] for index in indices]
                params = self._params(part, masked, adjusted)
                batch.unmasked |= {indices[row] for row in part.unmasked}
                calls.append(SampleCall(sequences, SampleInputs(len(indices), rows, params), indices))
        return calls

    def _call(self, batch: SampleBatch, masked: bool) -> SampleCall:
        sequences = batch.sequences
        if not sequences:
            return SampleCall(sequences, SampleInputs(0, None, None))
        if batch.is_kept:
            return SampleCall(sequences, SampleInputs(len(sequences), None, None))
        changes = batch.needs_previous_tokens or batch.has_logit_processors
        batch.is_kept = self._keeps_params and batch is self._last and not changes
        params = self._params(batch, masked, adjusted=False)
        return SampleCall(sequences, SampleInputs(len(sequences), None, params, keeps_params=batch.is_kept))

    def _params(self, batch: SampleBatch, masked: bool, adjusted: bool) -> SamplingArrays:
        shaped = batch.sequences if batch.has_logit_processors else []
        seen = [sequence.seen_tokens() for sequence in shaped]
        mask = None
        if batch.drafts is not None:
            seen = [
                one if one is None else one.extended(drafts) for one, drafts in zip(seen, batch.drafts, strict=False)
            ]
            if masked:
                mask, batch.unmasked = self._masks.build_runs(batch.sequences, batch.drafts)
        elif masked:
            mask = self._masks.build(batch.sequences)
        rows = SampledRows(
            records=[sequence.sampling_record for sequence in batch.sequences],
            positions=batch.positions.astype(np.uint32),
            sampling=[sequence.sampling for sequence in shaped],
            seen=seen,
            num_prompt_tokens=[sequence.num_prompt_tokens for sequence in shaped],
            mask=mask,
        )
        return sampling_arrays(rows, self._vocab_size, self._eos_token_ids, list, adjusts_logprobs=adjusted)


def read_result(
    calls: Seq[SampleCall],
    batch: SampleBatch,
    arrays: Seq[list[np.ndarray]],
    *,
    prompt_logprobs: tuple[PromptLogprobs, ...],
    pooled: tuple[PooledPrompt, ...],
) -> StepResult:
    """Return tokens in the order of the plan's sampled sequences; `arrays`: see RunningStep."""
    if len(calls) == 1:
        indices, indptr = _accepted(batch, arrays[0], batch.indices)
        result = _result(batch.sequences, arrays[0], indices)
    else:
        rows = _sampled_rows(calls, arrays)
        tokens = np.array([row.token_id for row in rows]), np.array([row.is_nan for row in rows])
        indices, indptr = _accepted(batch, tokens, batch.indices)
        result = StepResult.of(rows[index] for index in indices.tolist())
    if indptr is not None:
        first_of = {first: index for index, first in enumerate(indptr[:-1])}
        failed = frozenset(first_of[index] for index in result.failed)
        result = replace(result, indptr=indptr, failed=failed)
    if prompt_logprobs or pooled:
        result = replace(result, prompt_logprobs=prompt_logprobs, pooled=pooled)
    return result


def _sampled_rows(calls: Seq[SampleCall], arrays: Seq[list[np.ndarray]]) -> list[SampledToken]:
    rows: dict[int, SampledToken] = {}
    for call, own in zip(calls, arrays, strict=True):
        every = range(len(call.sequences))
        sampled = _result(call.sequences, own, np.array(every, np.int64)).sampled_tokens()
        rows.update(zip(every if call.indices is None else call.indices, sampled, strict=True))
    return [rows[row] for row in range(len(rows))]


def _accepted(batch: SampleBatch, sampled: Seq[np.ndarray], firsts: np.ndarray) -> tuple[np.ndarray, list[int] | None]:
    """Return the accepted rows, and each sequence's start among them: its first row, then each row after a draft that
    equals the token before it. `sampled`: token ids and NaN flags of all rows. Without drafts: `firsts`, None.

    A row with NaN logits or a failed matcher ends the run before it; the next step samples it without drafts.
    """
    if batch.next_drafts is None:
        return firsts, None
    token_ids, is_nan, *_ = sampled
    is_bad = is_nan.copy()
    is_bad[sorted(batch.unmasked)] = True
    is_last = (token_ids != batch.next_drafts()) | is_nan | np.append(is_bad[1:], True)
    lasts = np.flatnonzero(is_last)
    lengths = lasts[np.searchsorted(lasts, firsts)] - firsts + 1
    ends = np.cumsum(lengths)
    rows = np.arange(ends[-1]) + np.repeat(firsts - ends + lengths, lengths)
    return rows, [0, *ends.tolist()]


def _batch_of_decodes(layout: BatchLayout) -> SampleBatch:
    decodes, inputs = layout.decodes, layout.inputs
    tails = [chunk for chunk in layout.prefills if chunk.sampled_sequences]
    count = len(decodes)
    others = [
        (sequence, row, chunk.end) for row, chunk in enumerate(tails, count) for sequence in chunk.sampled_sequences
    ]
    sequences, rows, ends = zip(*others, strict=True) if others else ((), (), ())
    return SampleBatch(
        sequences=[*decodes, *sequences] if others else decodes,
        rows=[*range(count), *rows],
        positions=np.append(inputs.context_lens[:count], np.array(ends, np.int32)),
        num_own_rows=count,
        indices=np.append(layout.row_of_decode, np.arange(count, count + len(others))),
    )


def _batch_of_chunks(layout: BatchLayout) -> SampleBatch:
    chunks = [chunk for chunk in layout.chunks if chunk.sampled_sequences]
    logit_rows = [(chunk, number) for chunk in chunks for number in range(len(chunk.drafts) + 1)]
    sampled = [(row, *each, sequence) for row, each in enumerate(logit_rows) for sequence in each[0].sampled_sequences]
    sequences = [sequence for *_, sequence in sampled]
    index_of = {sequence: index for index, (_, _, number, sequence) in enumerate(sampled) if number == 0}
    ends = [chunk.end - len(chunk.drafts) + number for _, chunk, number, _ in sampled]
    drafted = layout.has_drafts
    return SampleBatch(
        sequences=sequences,
        rows=[row for row, *_ in sampled],
        positions=np.array(ends, np.int32),
        num_own_rows=0,
        indices=np.array([index_of[sequence] for sequence in layout.plan.sampled_sequences], np.int64),
        drafts=[chunk.drafts[:number] for _, chunk, number, _ in sampled] if drafted else None,
        next_drafts=partial(_next_drafts, chunks) if drafted else None,
    )


def _next_drafts(chunks: Seq[Chunk]) -> np.ndarray:
    return np.array([draft for chunk in chunks for _ in chunk.sampled_sequences for draft in (*chunk.drafts, NO_DRAFT)])


def _result(sequences: list[Sequence], arrays: list[np.ndarray], indices: np.ndarray) -> StepResult:
    if not sequences:
        return StepResult(())
    token_ids, is_nan, *logprobs = (array[indices] for array in arrays)
    token_logprobs = (
        _logprobs([sequences[index] for index in indices], *(array.tolist() for array in logprobs))
        if logprobs
        else None
    )
    return StepResult(token_ids.tolist(), token_logprobs, frozenset(np.flatnonzero(is_nan).tolist()))


def _logprobs(
    sequences: list[Sequence], chosen: list[float], top_ids: list[list[int]], top: list[list[float]]
) -> list[TokenLogprob | None]:
    wanted = [sequence.num_alternatives for sequence in sequences]
    return [
        None if count is None else TokenLogprob(chosen[row], tuple(top_ids[row][:count]), tuple(top[row][:count]))
        for row, count in enumerate(wanted)
    ]
