"""Drafts of a head on static buffers, with one captured graph per number of sequences and draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from model.families.eagle3_device import DeviceEagle3, DraftBatch, ReadRows, sampling_columns, sampling_of
from model.ops.interface import Array, DraftPlan, DraftRuns
from model.ops.packing import Packing, TableRows

NUM_TIMED = 3
"""Replays per measurement of `token_s`."""


@dataclass(frozen=True)
class _Static:
    """Buffers and replays for one number of sequences."""

    packed: Array  # uint8, sent by the host
    runs: Array  # int32[S, 4]
    batch: DraftBatch
    replays: list[Callable[[], None]]  # one per draft
    token_s: float


class DraftGraphs:
    """Graphs of `max_drafts` drafts for up to max(`sizes`) sequences, after steps of at most `max_rows` rows."""

    def __init__(self, head: DeviceEagle3, kv: Array, out: Array, sizes: Sequence[int], max_drafts: int, max_rows: int):
        """`out` int32[max_drafts * max(sizes) or more] receives the drafts of every size, from its beginning on."""
        ops, width = head.ops, head.config.hidden_size
        self._head, self._kv, self._sizes, self._max_drafts, self._out = head, kv, sorted(sizes), max_drafts, out
        longest = len(head.weights.rotation.cos) + max_drafts + 1
        self.max_blocks = -(-longest // int(kv.shape[4]))
        self._tables = ops.upload(np.zeros((max(sizes), self.max_blocks), np.int32))
        self._hidden = ops.empty((max(sizes), width), ops.dtype)
        self.max_rows = max_rows
        self._rows = ReadRows(*(ops.empty((max_rows, n), ops.dtype) for n in (width, head.weights.qkv.shape[0])))
        self._statics = {size: self._captured(size) for size in reversed(self._sizes)}

    def size_of(self, num_sequences: int) -> int | None:
        """Return the captured number of sequences that holds these, or None."""
        return next((size for size in self._sizes if size >= num_sequences), None)

    def token_s(self, num_sequences: int) -> float:
        """Return the seconds per draft, measured on padding; infinity beyond the largest size."""
        size = self.size_of(num_sequences)
        return math.inf if size is None else self._statics[size].token_s

    def rows(self, num_rows: int) -> ReadRows:
        """Return the buffers that `DeviceEagle3.read` fills for drafts."""
        return ReadRows(self._rows.hidden[:num_rows], self._rows.qkv[:num_rows])

    def send(self, hosts: Sequence[np.ndarray], tables: np.ndarray) -> None:
        """Send runs int32[S, 4], the columns of `sampling_of` and the first blocks int32[S, w]; S is a captured
        size."""
        places = np.arange(len(tables), dtype=np.int32)
        self._head.ops.upload_all(hosts, self._statics[len(tables)].packed, TableRows(tables, places, self._tables))

    def draft(self, sampled: Array, rows: tuple[Array, Array], size: int, num_drafts: int) -> Array:
        """Draft after a step of `rows` (token ids, positions) that was read into `self.rows`; call `send` first.

        Return int32[num_drafts, size], the beginning of `out`.
        """
        static = self._statics[size]
        batch = static.batch
        runs = DraftRuns(static.runs, batch.tables, int(self._kv.shape[4]))
        self._head.ops.plan_drafts(sampled, rows, runs, batch.plan)
        for replay in static.replays[:num_drafts]:
            replay()
        return batch.out[:num_drafts]

    def _captured(self, size: int) -> _Static:
        ops = self._head.ops
        hosts = [np.zeros((size, 4), np.int32), *sampling_columns(b"", size)]
        packed = ops.empty((Packing.of(hosts).num_bytes,), np.dtype(np.uint8))
        runs, *columns = ops.upload_all(hosts, packed)
        plan = DraftPlan(
            last_rows=ops.upload(np.zeros(size, np.int32)),
            num_accepted=ops.upload(np.zeros(size, np.int32)),
            places=ops.upload(np.zeros((self._max_drafts + 2, size), np.int32)),
            slots=ops.upload(np.full((self._max_drafts, size), -1, np.int64)),
        )
        out = self._out[: self._max_drafts * size].reshape(self._max_drafts, size)
        batch = DraftBatch(plan, self._tables[:size], sampling_of(columns, plan), self._hidden[:size], out)
        works = [partial(self._head.draft_one, each, self._rows, batch, self._kv) for each in range(self._max_drafts)]
        replays = [ops.capture(work) for work in works]
        begin = ops.record_event()
        for replay in replays * NUM_TIMED:
            replay()
        seconds = ops.elapsed_s(begin, ops.record_event()) / (NUM_TIMED * len(replays))
        return _Static(packed, runs, batch, replays, seconds)
