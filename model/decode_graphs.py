"""The forward pass of single-token rows on buffers that never move, captured once for each of some batch sizes.

A step of n sequences runs on the smallest captured size that holds them. The rows behind n are padding: they have no
context, write no key, and nobody reads their logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from model.batch import Batch
from model.llama import Llama
from model.ops.interface import Array
from model.ops.packing import Packing


@dataclass(frozen=True)
class DecodeInputs:
    """What the host knows of n rows; see model.batch.Batch."""

    token_ids: np.ndarray  # int32[n]
    source: np.ndarray  # int32[n], row among the tokens the step before has sampled; one outside them leaves token_ids
    positions: np.ndarray  # int32[n]
    slots: np.ndarray  # int64[n]
    context_lens: np.ndarray  # int32[n]
    block_tables: np.ndarray  # int32[n, w], w at most max_blocks


NO_ROWS = DecodeInputs(*(np.empty(0, np.int32),) * 5, np.empty((0, 0), np.int32))


class DecodeGraphs:
    """Owns the buffers of `max_rows` rows and one replay per batch size. `sampled` int32[max_rows] is the caller's: the
    tokens that the step before has sampled."""

    def __init__(self, model: Llama, sampled: Array, max_rows: int, max_blocks: int):
        ops = model.ops
        self._model = model
        self._sampled = sampled
        self._max_rows = max_rows
        self._block_tables = ops.empty((max_rows, max_blocks), np.dtype(np.int32))
        self._logits = ops.empty((max_rows, model.config.vocab_size), np.dtype(np.float32))
        self._num_slots = 0
        padding = self._columns(NO_ROWS)
        self._columns_at = ops.empty((Packing.of(padding).num_bytes,), np.dtype(np.uint8))
        self._token_ids, self._source, *self._rest = ops.upload_all(padding, self._columns_at)
        self._no_queries = ops.upload(np.zeros(1, np.int32))
        self._replays: dict[int, Callable[[], None]] = {}
        self._sizes: list[int] = []

    def capture(self, kv: Array, *, progress: bool = False) -> None:
        """Record the pass on this cache, the largest size first, so that the smaller ones find its memory."""
        self._num_slots = kv.shape[0] * kv.shape[4]
        self._sizes = batch_sizes(self._max_rows)
        self._upload(NO_ROWS)
        for size in tqdm(self._sizes[::-1], desc="graphs", disable=not progress):
            self._replays[size] = self._model.ops.capture(partial(self._run, size, self._batch(size), kv))

    def forward(self, inputs: DecodeInputs) -> Array:
        """Logits float32[n, V], good until the next call."""
        num_rows = len(inputs.token_ids)
        self._upload(inputs)
        self._model.ops.upload_rows(inputs.block_tables, self._block_tables)
        self._replays[self._sizes[bisect_left(self._sizes, num_rows)]]()
        return self._logits[:num_rows]

    def _run(self, size: int, batch: Batch, kv: Array) -> None:
        ops = self._model.ops
        with ops.scratch():
            ops.pick_tokens(batch.token_ids, self._sampled, self._source[:size])
            self._model.forward(batch, kv, out=self._logits[:size])

    def _upload(self, inputs: DecodeInputs) -> None:
        self._model.ops.upload_all(self._columns(inputs), self._columns_at)

    def _columns(self, inputs: DecodeInputs) -> list[np.ndarray]:
        """All rows, padding included; a slot outside the cache is not written."""
        fills = (
            (inputs.token_ids, np.int32, 0),
            (inputs.source, np.int32, self._max_rows),
            (inputs.positions, np.int32, 0),
            (inputs.slots, np.int64, self._num_slots),
            (inputs.context_lens, np.int32, 0),
        )
        columns = []
        for known, dtype, padding in fills:
            column = np.full(self._max_rows, padding, dtype)
            column[: len(known)] = known
            columns.append(column)
        return columns

    def _batch(self, size: int) -> Batch:
        positions, slots, context_lens = (column[:size] for column in self._rest)
        return Batch(
            token_ids=self._token_ids[:size],
            positions=positions,
            slots=slots,
            block_tables=self._block_tables[:size],
            context_lens=context_lens,
            query_start=self._no_queries,
            logit_rows=None,
            num_decodes=size,
            num_tokens=size,
            num_sequences=size,
            max_query_len=0,
        )


def batch_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of an eighth of the next power of two and of 8 at least: padding costs little."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // 16)
    return [*sizes, max_rows]
