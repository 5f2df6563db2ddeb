"""Runs a model's forward pass as an engine does, on a paged cache with blocks in random order."""

from __future__ import annotations

import numpy as np

from model.batch import Batch
from model.families.llama import Llama
from model.kv_cache import block_shape


def nan_of(kv_dtype: np.dtype) -> float | int:
    """Return NaN as an element of the cache."""
    return 0x7F if kv_dtype == np.uint8 else np.nan


class PagedSequences:
    """Sequences of up to `max_len` tokens with all their blocks allocated; unwritten memory holds NaN."""

    def __init__(self, model: Llama, num_sequences: int, max_len: int, block_size: int):
        width = -(-max_len // block_size)
        num_blocks = num_sequences * width + 1
        shuffled = np.random.default_rng(block_size).permutation(num_blocks)
        self.tables = np.zeros((num_sequences, width + 1), np.int32)
        self.tables[:, :width] = shuffled[: num_sequences * width].reshape(num_sequences, width)
        self.num_computed = [0] * num_sequences
        self._model = model
        self._block_size = block_size
        shape = (num_blocks, *block_shape(model.config, block_size, model.ops.num_ranks))
        self._kv = model.ops.upload(np.full(shape, nan_of(model.ops.kv_dtype), model.ops.kv_dtype))

    def forward(self, chunks: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Run a step of (sequence, next token ids); return each one's logits float32[length, V]."""
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i][1]) != 1)
        ordered = [chunks[i] for i in order]
        ops = self._model.ops
        with ops.scratch():
            logits = ops.download(self._model.forward(self._batch(ordered), self._kv))
        assert logits.dtype == np.float32
        for sequence, token_ids in ordered:
            self.num_computed[sequence] += len(token_ids)
        ends = np.cumsum([len(token_ids) for _, token_ids in ordered])
        pieces = np.split(logits, ends[:-1])
        return [pieces[order.index(i)] for i in range(len(chunks))]

    def hidden(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the final hidden states [length, H] of the first sequence, which begins with these tokens."""
        ops = self._model.ops
        with ops.scratch():
            return np.array(ops.download(self._model.hidden(self._batch([(0, token_ids)]), self._kv)))

    def _batch(self, chunks: list[tuple[int, np.ndarray]]) -> Batch:
        upload = self._model.ops.upload
        lengths = np.array([len(token_ids) for _, token_ids in chunks], np.int32)
        starts = np.array([self.num_computed[sequence] for sequence, _ in chunks], np.int32)
        tables = self.tables[[sequence for sequence, _ in chunks]]
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        blocks = tables[np.repeat(np.arange(len(chunks)), lengths), positions // self._block_size].astype(np.int64)
        num_decodes = int(np.count_nonzero(lengths == 1))
        return Batch(
            token_ids=upload(np.concatenate([token_ids for _, token_ids in chunks]).astype(np.int32)),
            positions=upload(positions.astype(np.int32)),
            slots=upload(blocks * self._block_size + positions % self._block_size),
            block_tables=upload(tables),
            context_lens=upload(starts + lengths),
            query_start=upload(np.concatenate([[num_decodes], lengths.cumsum()[num_decodes:]]).astype(np.int32)),
            logit_rows=upload(np.arange(lengths.sum(), dtype=np.int32)),
            num_decodes=num_decodes,
            num_tokens=int(lengths.sum()),
            num_sequences=len(chunks),
            max_query_len=int(lengths[num_decodes:].max(initial=0)),
        )
