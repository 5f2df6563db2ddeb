"""EAGLE-3 drafter on the device: it drafts after each step there, and the host fetches the drafts with the next
plan."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from model.batch import StateRows
from model.cuda_graphs import DRAFTED_ROWS
from model.draft_graphs import DraftGraphs
from model.families.eagle3_device import DeviceEagle3, sampling_columns
from model.ops.interface import Array
from service.engine.drafting.drafter import EAGLE3, LateDrafts
from service.engine.execution.decode_batch import BatchLayout
from service.engine.execution.model_runner import ModelRunner
from service.engine.execution.sampling import SampleBatch, SampleCall
from service.engine.sequence import Sequence
from service.engine.step import Chunk

_INT32 = np.dtype(np.int32)
NOT_SAMPLED = -1
MAX_DRAFTED = 64
"""Maximum sequences to draft for; with more, a step is no longer bound by reading weights."""


class _Run(NamedTuple):
    """Rows of a sequence that a step samples."""

    sequence: Sequence
    first_row: int
    first_sample: int
    num_rows: int
    start: int  # position of the first row
    num_held: int  # tokens that its blocks hold


@dataclass(slots=True)
class _Drafted:
    """Drafts of the last step."""

    columns: dict[Sequence, tuple[int, int]]  # (column, tokens that the sequence's blocks hold)
    num_drafts: int
    size: int  # sequences, including padding
    fetch: Callable[[], list[np.ndarray]]  # int32[num_drafts, size]
    tokens: list[list[int]] | None = None  # by column, once fetched

    def read(self, column: int, count: int) -> list[int]:
        if self.tokens is None:
            self.tokens = self.fetch()[0].T.tolist()
        return self.tokens[column][:count]


class DeviceEagle3Drafter:
    """Drafter that reads each step's rows once they are sampled, so that only keys and values persist per sequence.
    After a step it drafts as many tokens as the last `draft` call asked for, and none if a step with decodes had no
    call."""

    source, writes_cache = EAGLE3, True

    def __init__(self, head: DeviceEagle3, kv: Array, runner: ModelRunner, max_num_seqs: int, max_drafts: int):
        """`kv` [num_blocks, L + 1, 2, Hkv, B, D]."""
        self._head, self._ops, self._kv = head, head.ops, kv
        self._first_late_row = runner.first_late_row
        sizes = powers_of_two(min(max_num_seqs, MAX_DRAFTED))
        tune = partial(head.tune, sorted({*DRAFTED_ROWS, *powers_of_two(runner.first_late_row)}), sizes)
        head.ops.compile_ahead(tune)
        tune()
        out = runner.sampled[self._first_late_row :]
        self._graphs = DraftGraphs(head, kv, out, sizes, max_drafts, runner.max_captured_rows)
        self._num_drafts, self._was_asked, self._num_sequences = max_drafts, False, 1
        self._drafted: _Drafted | None = None

    @property
    def token_s(self) -> float:
        return self._graphs.token_s(self._num_sequences)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self._head.config.state_layers

    def on_end(self, sequence: Sequence) -> None:
        if self._drafted is not None:
            self._drafted.columns.pop(sequence, None)

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[Seq[int]]:
        """Return drafts for the last step; the device compares them as the host does. Does not wait."""
        self._num_drafts, self._was_asked = max(max_tokens), True
        if self._drafted is None:
            return [()] * len(sequences)
        pairs = zip(sequences, max_tokens, strict=True)
        return [self._drafts_of(self._drafted, sequence, count) for sequence, count in pairs]

    def follow(
        self, layout: BatchLayout, batch: SampleBatch, calls: Seq[SampleCall], rows: StateRows, sampled: Array
    ) -> None:
        """Read the rows of a sampled step, then draft. Does not wait."""
        self._num_sequences = max(1, len(layout.plan.sampled_sequences))
        sources = _sources(layout, batch, calls[0], len(rows.token_ids))
        is_captured = len(sources) <= self._graphs.max_rows
        runs = self._runs(layout, sources) if self._num_wanted(layout) and is_captured else []
        next_ids, source = self._ops.upload_all([_known_tokens(layout, len(sources)), sources])
        self._ops.pick_tokens(next_ids, sampled, source)
        self._head.read(rows, next_ids, self._kv, self._graphs.rows(len(sources)) if runs else None)
        self._drafted = self._draft(runs, sampled, (rows.token_ids, rows.positions)) if runs else None

    def _num_wanted(self, layout: BatchLayout) -> int:
        if layout.plan.num_decodes and not self._was_asked:
            self._num_drafts = 0
        self._was_asked = False
        return self._num_drafts

    def _runs(self, layout: BatchLayout, sources: np.ndarray) -> list[_Run]:
        first_rows, runs = layout.first_rows(), []
        for chunk in layout.plan.chunks:
            sequence = chunk.sequence
            row = first_rows[id(chunk)] + chunk.length - 1 - len(chunk.drafts)
            if _is_alone(chunk) and sources[row] != NOT_SAMPLED:
                start, num_held = chunk.end - 1 - len(chunk.drafts), len(sequence.block_table) * int(self._kv.shape[4])
                runs.append(_Run(sequence, row, int(sources[row]), 1 + len(chunk.drafts), start, num_held))
        return runs

    def _draft(self, runs: list[_Run], sampled: Array, rows: tuple[Array, Array]) -> _Drafted | None:
        size, block_size = self._graphs.size_of(len(runs)), int(self._kv.shape[4])
        if size is None:
            return None
        described = np.zeros((size, 4), np.int32)
        described[: len(runs)] = [(run.first_row, run.first_sample, run.num_rows, run.num_held) for run in runs]
        longest = max(run.start + run.num_rows for run in runs) + self._num_drafts
        tables = np.zeros((size, min(self._graphs.max_blocks, -(-longest // block_size))), np.int32)
        for row, run in zip(tables, runs, strict=False):
            table = run.sequence.block_table[: len(row)]
            row[: len(table)] = table
        records = b"".join(run.sequence.sampling_record for run in runs)
        self._graphs.send([described, *sampling_columns(records, size)], tables)
        fetch = self._ops.download_async([self._graphs.draft(sampled, rows, size, self._num_drafts)])
        columns = {run.sequence: (column, run.num_held) for column, run in enumerate(runs)}
        return _Drafted(columns, self._num_drafts, size, fetch)

    def _drafts_of(self, drafted: _Drafted, sequence: Sequence, count: int) -> Seq[int]:
        """Return a sequence's drafts. If a grammar ended the run earlier than the device did, they are of later tokens,
        hence wrong."""
        if sequence not in drafted.columns:
            return ()
        column, num_held = drafted.columns[sequence]
        count = min(count, drafted.num_drafts, max(0, num_held + 1 - sequence.num_computed_tokens))
        first = self._first_late_row + column
        return LateDrafts(
            range(first, first + count * drafted.size, drafted.size), partial(drafted.read, column, count)
        )


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ..., the last at least `most`."""
    return [1 << exponent for exponent in range((most - 1).bit_length() + 1)]


def _is_alone(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return chunk.sampled_sequences == (sequence,) and not sequence.cannot_run_ahead and not sequence.prefix_followers


def _sources(layout: BatchLayout, batch: SampleBatch, call: SampleCall, count: int) -> np.ndarray:
    """Return int32[count]: for each row that the call samples, its first sample."""
    sources = np.full(count, NOT_SAMPLED, np.int32)
    if batch.rows and call.sequences:
        indices = slice(None) if call.indices is None else call.indices
        own = layout.inputs.logit_rows[np.array(batch.rows)[indices]]
        sources[own[::-1]] = np.arange(len(own), dtype=np.int32)[::-1]
    return sources


def _known_tokens(layout: BatchLayout, count: int) -> np.ndarray:
    """Return int32[count]: the token after each row, where known."""
    known = np.zeros(count, np.int32)
    if layout.is_one_token_each and not layout.prefills:
        return known
    first_rows = layout.first_rows()
    for chunk in layout.plan.chunks:
        if chunk.length > 1 or not chunk.sampled_sequences:
            tokens = chunk.sequence.token_ids[chunk.start + 1 : chunk.end + 1]
            first = first_rows[id(chunk)]
            known[first : first + len(tokens)] = np.frombuffer(tokens, np.uint32)
    return known
