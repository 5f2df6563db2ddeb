"""EAGLE-3 drafter on the host, from the hidden states of the model's steps."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from model.families.eagle3 import Eagle3Head
from model.ops.group.arrays import on_rank
from model.ops.interface import Array
from service.engine.drafting.drafter import EAGLE3
from service.engine.drafting.draws import drawn
from service.engine.drafting.step_cost import DraftTime
from service.engine.execution.decode_batch import BatchLayout
from service.engine.sequence import Sequence

MAX_PENDING_ROWS = 512
"""Maximum unread states per sequence; beyond it the head reads them even without drafting."""
SHORT_CATCH_UP = 32
"""Rows per sequence up to which a call counts as decoding; prompt rows would distort the time per token."""


@dataclass(slots=True)
class _States:
    """States [n, k H] from position `start` on that the head has not read."""

    start: int
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.rows))

    def cut(self, end: int) -> None:
        """Drop the states of rejected drafts."""
        excess = self.end - end
        while excess > 0 and self.rows:
            last = self.rows.pop()
            if len(last) > excess:
                self.rows.append(last[: len(last) - excess])
            excess -= len(last)


@dataclass(slots=True)
class _Context:
    """Keys and values of S sequences, gathered for one call. Drafts add theirs only here, since the next call
    recomputes them from the model's states."""

    keys: np.ndarray  # [S, Hkv, C, D]
    values: np.ndarray
    mask: np.ndarray  # [S, 1, 1, C], 0 or -inf
    window: int  # a query at p sees keys from p - window + 1 on

    def add(self, positions: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Add a position, keys and values [s, Hkv, D] to the first s sequences; drop the others."""
        count = len(positions)
        rows = np.arange(count)
        self.keys, self.values, self.mask = self.keys[:count], self.values[:count], self.mask[:count]
        self.keys[rows, :, positions] = keys
        self.values[rows, :, positions] = values
        self.mask[rows, 0, 0, positions] = 0
        beyond = rows[positions >= self.window]
        self.mask[beyond, 0, 0, positions[beyond] - self.window] = -np.inf


class Eagle3Drafter:
    """Drafter with its keys and values in the model's blocks. States of a prefix-cache hit are not recomputed: the keys
    are there if the head has read that prefix."""

    source, writes_cache = EAGLE3, True

    def __init__(self, head: Eagle3Head, kv: Array):
        """`kv` [num_blocks, 1, 2, Hkv, B, D]."""
        self._head, self._kv, self._block_size = head, kv, kv.shape[4]
        self._states: dict[Sequence, _States] = {}
        self._time = DraftTime()

    @property
    def token_s(self) -> float:
        return self._time.token_s

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self._head.config.state_layers

    def read_states(self, layout: BatchLayout, states: Array) -> None:
        """Keep the states [T, k H] of a step's rows, which are the same on each rank."""
        own = on_rank(states, 0)
        first_rows = layout.first_rows()
        for chunk in layout.plan.chunks:
            sequence = chunk.sequence
            if sequence.cannot_run_ahead or sequence.sampling.pooling is not None:
                continue
            first = first_rows[id(chunk)]
            kept = self._states.get(sequence)
            if kept is not None:
                kept.cut(chunk.start)
            if kept is None or kept.end != chunk.start:
                kept = self._states[sequence] = _States(chunk.start)
            elif kept.end - kept.start > MAX_PENDING_ROWS:
                self._write_keys(sequence, kept)
            kept.rows.append(own[first : first + chunk.length])

    def on_end(self, sequence: Sequence) -> None:
        """Complete the keys of the blocks, which the prefix cache may keep."""
        kept = self._states.pop(sequence, None)
        if kept is not None and sequence.block_table:
            kept.cut(sequence.num_computed_tokens)
            self._write_keys(sequence, kept)

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[tuple[int, ...]]:
        start_s = time.perf_counter()
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        counts = dict(zip(sequences, max_tokens, strict=True))
        ready = sorted(filter(self._is_ready, sequences), key=lambda one: -counts[one])
        if ready:
            with np.errstate(over="ignore", invalid="ignore"):
                num_rows = self._draft(ready, counts, drafts)
            if num_rows <= SHORT_CATCH_UP * len(ready):
                self._time.add((time.perf_counter() - start_s) / max(max_tokens))
        return [tuple(drafts[sequence]) for sequence in sequences]

    def _draft(self, ready: list[Sequence], counts: dict[Sequence, int], drafts: dict[Sequence, list[int]]) -> int:
        """Extend `drafts` of the `ready` sequences, sorted by draft length, longest first; return the number of states
        read."""
        head, num_steps = self._head, counts[ready[0]]
        tables = self._tables(ready, num_steps)
        hidden, q, num_rows = self._catch_up(ready, tables)
        lengths = np.array([sequence.num_computed_tokens for sequence in ready])
        context = self._gather(tables, lengths)
        for step in range(1, num_steps + 1):
            attended = head.attend(q, context.keys, context.values, context.mask)
            hidden, logits = head.finish(hidden, attended)
            ids = drawn(logits, ready, lengths[: len(ready)] + step, head.token_ids)
            for sequence, token_id in zip(ready, ids.tolist(), strict=True):
                drafts[sequence].append(token_id)
            ready = [sequence for sequence in ready if counts[sequence] > step]
            if ready:
                count, positions = len(ready), lengths[: len(ready)] + (step - 1)
                hidden = hidden[:count]
                q, keys, values = head.project(hidden, ids[:count], positions)
                context.add(positions, keys, values)
        return num_rows

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return True if the state of the last computed position is available."""
        kept, end = self._states.get(sequence), sequence.num_computed_tokens
        if kept is None:
            return False
        kept.cut(end)
        return kept.end == end and kept.start < end

    def _catch_up(self, ready: list[Sequence], tables: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Write the keys of all new positions; return hidden [S, H] and q [S, Hq, D] of the last ones, and the number
        of positions."""
        kept = [self._states[sequence] for sequence in ready]
        lengths = [one.end - one.start for one in kept]
        ends = np.cumsum(lengths)
        states = [rows for one in kept for rows in one.rows]
        token_ids: list[int] = []
        for sequence, one, length in zip(ready, kept, lengths, strict=True):
            token_ids += sequence.token_ids[one.start + 1 : one.start + 1 + length]
        starts = np.array([one.start for one in kept])
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        hidden = self._head.hidden(states[0] if len(states) == 1 else np.concatenate(states))
        q, keys, values = self._head.project(hidden, np.array(token_ids), positions)
        blocks, offsets = np.divmod(positions, self._block_size)
        self._write(tables[np.repeat(np.arange(len(ready)), lengths), blocks], offsets, keys, values)
        for sequence in ready:
            self._states[sequence] = _States(sequence.num_computed_tokens)
        return hidden[ends - 1], q[ends - 1], int(ends[-1])

    def _write_keys(self, sequence: Sequence, kept: _States) -> None:
        """Write and drop the states in `kept` whose next token is known."""
        end = min(kept.end, len(sequence.token_ids) - 1)
        if end <= kept.start:
            return
        positions, states = np.arange(kept.start, end), np.concatenate(kept.rows)
        token_ids = np.array(sequence.token_ids[kept.start + 1 : end + 1], np.int64)
        hidden = self._head.hidden(states[: len(positions)])
        _, keys, values = self._head.project(hidden, token_ids, positions)
        blocks, offsets = np.divmod(positions, self._block_size)
        self._write(np.array(sequence.block_table)[blocks], offsets, keys, values)
        kept.start, kept.rows = end, [states[len(positions) :]] if len(states) > len(positions) else []

    def _write(self, blocks: np.ndarray, offsets: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        self._kv[blocks, 0, 0, :, offsets] = keys
        self._kv[blocks, 0, 1, :, offsets] = values

    def _tables(self, ready: list[Sequence], num_drafts: int) -> np.ndarray:
        """Return block tables int64[S, n] for the known tokens and the drafts; missing blocks are 0 and masked."""
        end = max(sequence.num_computed_tokens for sequence in ready) + num_drafts
        width = -(-end // self._block_size)
        tables = np.zeros((len(ready), width), np.int64)
        for row, sequence in zip(tables, ready, strict=True):
            table = sequence.block_table[:width]
            row[: len(table)] = table
        return tables

    def _gather(self, tables: np.ndarray, lengths: np.ndarray) -> _Context:
        sides, heads = np.arange(2)[:, None, None], np.arange(self._kv.shape[3])[:, None]
        gathered = self._kv[tables[:, None, None, :], 0, sides, heads]  # [S, 2, Hkv, n, B, D]
        gathered = gathered.reshape(*gathered.shape[:3], -1, gathered.shape[-1])
        places, ends, window = np.arange(gathered.shape[3]), lengths[:, None], self._head.config.window
        is_visible = (places < ends) & (places >= ends - window)
        mask = np.where(is_visible, np.float32(0), np.float32(-np.inf))[:, None, None]
        return _Context(gathered[:, 0], gathered[:, 1], mask, window)
