"""The forward pass on buffers that never move, captured once for each of some sizes.

A size is so many single-token rows (decodes) and so many tokens of longer chunks behind them. A step runs on the
smallest captured size that holds it; what the size has more is padding: it has no context, writes no key, and nobody
reads its logits. A step that fits no size is the caller's to run by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from model.batch import Batch
from model.llama import Llama
from model.ops.interface import Array
from model.ops.packing import Packing

CHUNKED_TOKENS = (64, 128, 256, 512)
"""Captured sizes of what stands behind the decodes. Above, the device is busy for longer than launching takes."""

MAX_CHUNKS = 32
"""Longer chunks in a captured step."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the host knows of a step of T tokens of S sequences, those of one token first; see model.batch.Batch."""

    token_ids: np.ndarray  # int32[T]
    source: np.ndarray  # int32[T], row among the tokens the step before has sampled; one outside them leaves token_ids
    positions: np.ndarray  # int32[T]
    slots: np.ndarray  # int64[T]
    context_lens: np.ndarray  # int32[S]
    block_tables: np.ndarray  # int32[S, w], w at most max_blocks
    query_lens: np.ndarray  # int32[S]
    logit_rows: np.ndarray  # int32[R]
    num_decodes: int


@dataclass(frozen=True)
class _Buffers:
    """Arrays of the largest step; a smaller one uses their beginnings."""

    token_ids: Array
    source: Array
    positions: Array
    slots: Array
    context_lens: Array
    query_start: Array
    logit_rows: Array


class StepGraphs:
    """Owns the buffers of `max_rows` decodes and one replay per size. `sampled` int32[max_rows] is the caller's: the
    tokens that the step before has sampled."""

    def __init__(self, model: Llama, sampled: Array, max_rows: int, max_blocks: int):
        ops = model.ops
        self._model = model
        self._sampled = sampled
        self._max_rows = max_rows
        self._num_slots = 0
        self._block_tables = ops.empty((max_rows + MAX_CHUNKS, max_blocks), np.dtype(np.int32))
        self._logits = ops.empty((max_rows + MAX_CHUNKS, model.config.vocab_size), np.dtype(np.float32))
        padding = self._padding()
        self._packed = ops.empty((Packing.of(padding).num_bytes,), np.dtype(np.uint8))
        self._buffers = _Buffers(*ops.upload_all(padding, self._packed))
        self._decodes_only = decode_sizes(max_rows)
        self._decodes_beside_chunks = self._decodes_only[3::4] or self._decodes_only[-1:]
        if self._decodes_beside_chunks[-1] != max_rows:
            self._decodes_beside_chunks.append(max_rows)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}

    def capture(self, kv: Array, *, progress: bool = False) -> None:
        """Record the pass on this cache, the largest size first, so that the smaller ones find its memory.

        Products are tuned for batches of a power of two: each more costs a start with an empty cache about 0.2 s.
        """
        self._num_slots = kv.shape[0] * kv.shape[4]
        sizes = [(decodes, tokens) for tokens in CHUNKED_TOKENS for decodes in self._decodes_beside_chunks]
        sizes += [(decodes, 0) for decodes in self._decodes_only]
        self._model.ops.upload_all(self._padding(), self._packed)
        self._model.tune([size for size in self._decodes_only if size.bit_count() == 1])
        for size in tqdm(sorted(sizes, key=sum, reverse=True), desc="graphs", disable=not progress):
            self._replays[size] = self._model.ops.capture(partial(self._run, self._batch(*size), kv))

    def forward(self, inputs: StepInputs) -> Array | None:
        """Logits float32[R, V], good until the next call; None where the step fits no captured size."""
        size = self._size_of(inputs)
        if size is None:
            return None
        columns, tables = self._padded(inputs, *size)
        self._model.ops.upload_all(columns, self._packed)
        self._model.ops.upload_rows(tables, self._block_tables)
        self._replays[size]()
        return self._logits[: len(inputs.logit_rows)]

    def _size_of(self, inputs: StepInputs) -> tuple[int, int] | None:
        num_decodes, num_chunks = inputs.num_decodes, len(inputs.query_lens) - inputs.num_decodes
        if num_chunks == 0 and len(inputs.logit_rows) == num_decodes:
            return _at_least(self._decodes_only, num_decodes), 0
        num_tokens = len(inputs.token_ids) - num_decodes
        if num_chunks > MAX_CHUNKS or num_tokens > CHUNKED_TOKENS[-1]:
            return None
        return _at_least(self._decodes_beside_chunks, num_decodes), _at_least(CHUNKED_TOKENS, num_tokens)

    def _run(self, batch: Batch, kv: Array) -> None:
        ops = self._model.ops
        with ops.scratch():
            ops.pick_tokens(batch.token_ids, self._sampled, self._buffers.source[: batch.num_tokens])
            num_logits = batch.num_tokens if batch.logit_rows is None else len(batch.logit_rows)
            self._model.forward(batch, kv, out=self._logits[:num_logits])

    def _batch(self, decodes: int, tokens: int) -> Batch:
        """The beginnings of the buffers: `decodes` rows, then `tokens` of up to MAX_CHUNKS longer chunks."""
        buffers, total = self._buffers, decodes + tokens
        num_sequences = decodes + (MAX_CHUNKS if tokens else 0)
        return Batch(
            token_ids=buffers.token_ids[:total],
            positions=buffers.positions[:total],
            slots=buffers.slots[:total],
            block_tables=self._block_tables[:num_sequences],
            context_lens=buffers.context_lens[:num_sequences],
            query_start=buffers.query_start,
            logit_rows=buffers.logit_rows[:num_sequences] if tokens else None,
            num_decodes=decodes,
            num_tokens=total,
            num_sequences=num_sequences,
            max_query_len=tokens,
        )

    def _padding(self) -> list[np.ndarray]:
        """In the order of _Buffers' fields: a step of padding alone. A slot outside the cache is not written."""
        num_tokens, num_sequences = self._max_rows + CHUNKED_TOKENS[-1], self._max_rows + MAX_CHUNKS
        return [
            np.zeros(num_tokens, np.int32),
            np.full(num_tokens, self._max_rows, np.int32),
            np.zeros(num_tokens, np.int32),
            np.full(num_tokens, self._num_slots, np.int64),
            np.zeros(num_sequences, np.int32),
            np.zeros(MAX_CHUNKS + 1, np.int32),
            np.zeros(num_sequences, np.int32),
        ]

    def _padded(self, inputs: StepInputs, decodes: int, tokens: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The buffers' contents for a step at this size, and its block tables: padding stands between the decodes and
        the longer chunks, and behind them."""
        n, columns = inputs.num_decodes, self._padding()
        shift = decodes - n
        by_token = (inputs.token_ids, inputs.source, inputs.positions, inputs.slots)
        for column, known in zip(columns, (*by_token, inputs.context_lens), strict=False):
            column[:n] = known[:n]
            column[decodes : len(known) + shift] = known[n:]
        *_, query_start, logit_rows = columns
        chunk_ends = np.cumsum(inputs.query_lens[n:])
        query_start[1 : len(chunk_ends) + 1] = chunk_ends
        query_start[len(chunk_ends) + 1 :] = chunk_ends[-1] if len(chunk_ends) else 0
        rows = inputs.logit_rows
        logit_rows[: len(rows)] = np.where(rows < n, rows, rows + shift)
        if not tokens:
            return columns, inputs.block_tables
        tables = np.zeros((len(inputs.context_lens) + shift, inputs.block_tables.shape[1]), np.int32)
        tables[:n], tables[decodes:] = inputs.block_tables[:n], inputs.block_tables[n:]
        return columns, tables


def decode_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of an eighth of the next power of two and of 8 at least: padding costs little."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // 16)
    return [*sizes, max_rows]


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return sizes[bisect_left(sizes, wanted)]
