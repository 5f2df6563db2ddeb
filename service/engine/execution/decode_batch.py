"""Host arrays of a step. Decodes keep their rows, and only changes are written."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from model.adapter_slots import NO_SLOT
from model.step_inputs import NO_PENDING_ROW, ForwardInputs
from service.engine.drafting.drafter import LateDrafts
from service.engine.sequence import Sequence
from service.engine.step import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Row layout of a plan: decodes, then longer chunks in plan order."""

    plan: StepPlan
    inputs: ForwardInputs
    decodes: list[Sequence]  # by row; the same object until a decode enters or leaves
    row_of_decode: np.ndarray  # int64, in plan order
    is_one_token_each: bool  # each decode samples only its own next token
    has_drafts: bool

    @property
    def prefills(self) -> tuple[Chunk, ...]:
        return self.plan.chunks[len(self.decodes) :]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks by row."""
        planned = self.plan.chunks
        order = np.argsort(self.row_of_decode).tolist()
        return (*(planned[index] for index in order), *self.prefills)

    def adapter_slots(self) -> np.ndarray | None:
        """Return each row's slot as int32[T]; None if no row has an adapter."""
        slots = [sequence.group.adapter_slot for sequence in self.decodes]
        slots += [chunk.sequence.group.adapter_slot for chunk in self.prefills]
        if all(slot is None for slot in slots):
            return None
        lengths = [1] * len(self.decodes) + [chunk.length for chunk in self.prefills]
        return np.repeat(np.array([NO_SLOT if slot is None else slot for slot in slots], np.int32), lengths)

    def first_rows(self) -> dict[int, int]:
        """Return each chunk's first row of hidden states by id(chunk)."""
        planned, num_decodes = self.plan.chunks, len(self.decodes)
        rows = dict(zip(map(id, planned), self.row_of_decode.tolist(), strict=False))
        starts = accumulate((chunk.length for chunk in self.prefills), initial=num_decodes)
        return rows | dict(zip(map(id, self.prefills), starts, strict=False))


class _PrefillArrays(NamedTuple):
    token_ids: np.ndarray
    pending_token_row: np.ndarray
    positions: np.ndarray  # rows of RopeTables
    slots: np.ndarray
    context_lens: np.ndarray
    table: np.ndarray


class DecodeBatch:
    """Persistent decode rows. A new sequence takes a vacated row or the next one; the last rows fill gaps."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, *, drafts_are_decodes: bool = False):
        """`drafts_are_decodes`: each draft is a decode row while `max_rows` suffice; otherwise a sequence with drafts
        is a chunk."""
        self._drafts_are_decodes = drafts_are_decodes
        self.dirty_tables = np.zeros(max_rows, np.bool_)
        """Rows whose block table is outdated on the device."""
        self._block_size = block_size
        self._tables = np.zeros((max_rows, max_blocks), np.int32)
        self._token_ids = np.zeros(max_rows, np.int32)
        self._pending_token_row = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._slots = np.zeros(max_rows, np.int64)
        self._context_lens = np.zeros(max_rows, np.int32)
        self._own_row = np.arange(max_rows, dtype=np.int32)
        self._sequences: list[Sequence] = []
        self._row_of: dict[Sequence, int] = {}
        self._planned: list[Sequence] = []
        self._order = np.zeros(0, np.int64)

    def lay_out(self, plan: StepPlan, sampled_rows: Mapping[Sequence, int]) -> BatchLayout:
        """Return the plan's arrays, valid until the next call. `sampled_rows`: rows of pending tokens not in their
        sequence's own row."""
        num_decodes = plan.num_decodes
        decodes, prefills = plan.chunks[:num_decodes], plan.chunks[num_decodes:]
        drafted = prefills[: self._num_drafted(num_decodes, prefills)]
        tails = [self._prefill_arrays(chunk, sampled_rows) for chunk in prefills[len(drafted) :]]
        sequences = [chunk.sequence for chunk in decodes]
        self._advance_all()
        fresh = plan.changed_tables
        if sequences != self._planned:
            fresh += tuple(chunk for chunk in decodes if chunk.sequence not in self._row_of)
            self._reassign_rows(sequences)
        for sequence in sampled_rows.keys() & self._row_of.keys():
            self._pending_token_row[self._row_of[sequence]] = sampled_rows[sequence]
        self._write(fresh)
        self._write_known([chunk for chunk in decodes if not chunk.sequence.num_pending_tokens])
        # Counted from the end, since the last decode may sample several sequences.
        num_longer = sum(len(chunk.sampled_sequences) for chunk in prefills)
        sampled = plan.sampled_sequences
        is_one_token_each = (sampled[: len(sampled) - num_longer] if prefills else sampled) == sequences
        due: slice | list[int] = slice(num_decodes)
        if not is_one_token_each:
            due = [self._row_of[chunk.sequence] for chunk in decodes if chunk.sampled_sequences]
        if drafted:
            tails.insert(0, self._draft_arrays(num_decodes, drafted))
        inputs = self._inputs(np.sort(self._own_row[due]), drafted, prefills[len(drafted) :], tails)
        has_drafts = any(chunk.drafts for chunk in prefills)
        return BatchLayout(plan, inputs, self._sequences, self._order, is_one_token_each, has_drafts)

    def _advance_all(self) -> None:
        rows = slice(len(self._sequences))
        for column in (self._positions, self._slots, self._context_lens):
            column[rows] += 1
        self._pending_token_row[rows] = self._own_row[rows]

    def _reassign_rows(self, sequences: list[Sequence]) -> None:
        staying, num_rows = set(sequences), len(sequences)
        held: list[Sequence | None] = [one if one in staying else None for one in self._sequences]
        held += [None] * (num_rows - len(held))
        holes = iter([row for row, one in enumerate(held) if one is None])
        for sequence in sequences:
            if sequence not in self._row_of:
                held[next(holes)] = sequence
        moved = [row for row in range(num_rows, len(held)) if held[row] is not None]
        targets = [next(holes) for _ in moved]
        if moved:
            for row, target in zip(moved, targets, strict=True):
                held[target] = held[row]
            for column in (self._positions, self._slots, self._context_lens, self._pending_token_row, self._tables):
                column[targets] = column[moved]
            self.dirty_tables[targets] = True
        self._sequences, self._planned = [one for one in held[:num_rows] if one is not None], sequences
        self._row_of = {sequence: row for row, sequence in enumerate(self._sequences)}
        self._order = np.array([self._row_of[sequence] for sequence in sequences], np.int64)

    def _write(self, chunks: tuple[Chunk, ...]) -> None:
        if not chunks:
            return
        rows = [self._row_of[chunk.sequence] for chunk in chunks]
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        for row, chunk in zip(rows, chunks, strict=True):
            table = chunk.sequence.block_table
            self._tables[row, : len(table)] = table
        blocks, offsets = np.divmod(starts, self._block_size)
        self._positions[rows] = starts + np.array([chunk.sequence.group.first_rope_row for chunk in chunks], np.int32)
        self._context_lens[rows] = starts + 1
        self._slots[rows] = self._tables[rows, blocks].astype(np.int64) * self._block_size + offsets
        self.dirty_tables[rows] = True

    def _write_known(self, chunks: list[Chunk]) -> None:
        if chunks:
            rows = [self._row_of[chunk.sequence] for chunk in chunks]
            self._token_ids[rows] = [chunk.sequence.token_ids[chunk.start] for chunk in chunks]
            self._pending_token_row[rows] = NO_PENDING_ROW

    def _prefill_arrays(self, chunk: Chunk, sampled_rows: Mapping[Sequence, int]) -> _PrefillArrays:
        """Build a chunk's arrays before rows are reassigned: its last token may be pending."""
        sequence, start, length, _, drafts = chunk
        known = sequence.token_ids[start : start + length]
        known.extend(drafts)
        pending_token_row = np.full(length, NO_PENDING_ROW, np.int32)
        if len(known) < length:
            known.append(0)
            pending_token_row[-1] = sampled_rows[sequence] if sequence in sampled_rows else self._row_of[sequence]
        positions = np.arange(start, start + length, dtype=np.int32)
        blocks, offsets = np.divmod(positions, self._block_size)
        table = np.array(sequence.block_table, np.int32)
        slots = table[blocks].astype(np.int64) * self._block_size + offsets
        token_ids = np.frombuffer(known, np.uint32).view(np.int32)
        rope_rows = positions + np.int32(sequence.group.first_rope_row)
        return _PrefillArrays(token_ids, pending_token_row, rope_rows, slots, positions + 1, table)

    def _draft_arrays(self, first: int, chunks: tuple[Chunk, ...]) -> _PrefillArrays:
        """Build the rows of tokens and their drafts from row `first`, and write their tables."""
        lengths = np.array([chunk.length for chunk in chunks])
        ends = np.cumsum(lengths)
        rows = slice(first, first + int(ends[-1]))
        token_ids: list[int] = []
        pending_token_row = np.full(int(ends[-1]), NO_PENDING_ROW, np.int32)
        for sequence, start, length, _, drafts in chunks:
            row, table = first + len(token_ids), np.frombuffer(sequence.block_table, np.int32)
            self._tables[row : row + length, : len(table)] = table
            token_ids.append(sequence.token_ids[start])
            if isinstance(drafts, LateDrafts):
                pending_token_row[len(token_ids) : len(token_ids) + len(drafts)] = drafts.rows
                drafts = (0,) * len(drafts)
            token_ids += drafts
        starts = np.array([chunk.start for chunk in chunks])
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        tables = self._tables[rows]
        slots = tables[np.arange(len(tables)), blocks].astype(np.int64) * self._block_size + offsets
        self.dirty_tables[rows] = True
        firsts = np.repeat([chunk.sequence.group.first_rope_row for chunk in chunks], lengths)
        rope_rows, context_lens = (positions + firsts).astype(np.int32), (positions + 1).astype(np.int32)
        return _PrefillArrays(np.array(token_ids, np.int32), pending_token_row, rope_rows, slots, context_lens, tables)

    def _inputs(
        self,
        logit_rows: np.ndarray,
        drafted: tuple[Chunk, ...],
        prefills: tuple[Chunk, ...],
        tails: list[_PrefillArrays],
    ) -> ForwardInputs:
        """Join the decode rows with `tails`: one for all `drafted` chunks, if any, then one per prefill."""
        num_decodes = len(self._sequences)
        rows, lengths = slice(num_decodes), [chunk.length for chunk in prefills]
        columns = [column[rows] for column in (self._token_ids, self._pending_token_row, self._positions, self._slots)]
        context_lens, num_draft_rows = self._context_lens[rows], 0
        if tails:
            columns = [_joined(pieces) for pieces in zip(columns, *(tail[:4] for tail in tails), strict=True)]
            draft_lens = [tail.context_lens for tail in tails[: bool(drafted)]]
            num_draft_rows = sum(map(len, draft_lens))
            context_lens = _joined((context_lens, *draft_lens, np.array([chunk.end for chunk in prefills], np.int32)))
            draft_rows = np.arange(num_decodes, num_decodes + num_draft_rows, dtype=np.int32)
            logit_rows = _joined((logit_rows, draft_rows, _logit_rows(num_decodes + num_draft_rows, prefills)))
        token_ids, pending_token_row, positions, slots = columns
        rows = slice(num_decodes + num_draft_rows)
        return ForwardInputs(
            token_ids=token_ids,
            pending_token_row=pending_token_row,
            positions=positions,
            slots=slots,
            context_lens=context_lens,
            logit_rows=logit_rows,
            num_decodes=num_decodes + num_draft_rows,
            tables=self._tables[rows],
            dirty_tables=self.dirty_tables[rows],
            chunk_lens=np.array(lengths, np.int32),
            chunk_tables=[tail.table for tail in tails[bool(drafted) :]],
            num_draft_rows=num_draft_rows,
        )

    def _num_drafted(self, num_decodes: int, prefills: tuple[Chunk, ...]) -> int:
        """Return how many leading chunks of `prefills` have drafts that fit as decode rows."""
        num_rows, count = num_decodes, 0
        for chunk in prefills if self._drafts_are_decodes else ():
            num_rows += chunk.length
            if not chunk.drafts or num_rows > len(self._own_row):
                break
            count += 1
        return count


def _logit_rows(first: int, prefills: tuple[Chunk, ...]) -> np.ndarray:
    """Return the rows to sample, counting from `first`: each chunk's last, and the rows before its drafts."""
    ends = accumulate((chunk.length for chunk in prefills), initial=first - 1)
    next(ends)
    due = [
        row
        for end, chunk in zip(ends, prefills, strict=True)
        if chunk.sampled_sequences
        for row in range(end - len(chunk.drafts), end + 1)
    ]
    return np.array(due, np.int32)


def _joined(pieces: Seq[np.ndarray]) -> np.ndarray:
    """Concatenate, without copying a single nonempty piece: a lone prompt waits for this."""
    filled = [piece for piece in pieces if len(piece)] or [pieces[0]]
    return filled[0] if len(filled) == 1 else np.concatenate(filled)
