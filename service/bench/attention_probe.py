"""Measures decode attention on a running engine's cache.

Parts of a captured step cannot be timed, so attention over all layers runs again on the same cache and lengths, planned
once.
"""

from __future__ import annotations

import numpy as np

from model.ops.interface import Array, AttentionBatch
from service.engine.build import BuiltEngine


class AttentionProbe:
    def __init__(self, built: BuiltEngine):
        self._built = built
        self._num_bytes = 0
        self._seconds = 0.0

    @property
    def gb_per_s(self) -> float:
        """Keys and values read per device second, in GB/s; 0 before the first pass."""
        return self._num_bytes / self._seconds / 1e9 if self._seconds else 0.0

    def look(self) -> None:
        """Time one pass over the running sequences."""
        tables = [sequence.block_table for sequence in self._built.engine.running if sequence.num_computed_tokens]
        lengths = [
            sequence.num_computed_tokens for sequence in self._built.engine.running if sequence.num_computed_tokens
        ]
        if not tables:
            return
        ops, config, kv = self._built.ops, self._built.config, self._built.executor.kv
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, blocks in zip(padded, tables, strict=True):
            row[: len(blocks)] = np.frombuffer(blocks, np.int32)
        shape = len(tables), config.num_heads // ops.num_ranks, config.head_dim
        q = np.random.default_rng(0).standard_normal(shape, np.float32)
        on_device = (ops.upload(q.astype(ops.dtype)), ops.upload(padded), ops.upload(np.array(lengths, np.int32)))
        out = ops.empty(q.shape, ops.dtype)
        replay = ops.capture(lambda: self._pass(*on_device, kv, out))
        begin = ops.record_event()
        replay()
        self._seconds += ops.elapsed_s(begin, ops.record_event())
        seen = sum(min(length, window) for window in config.windows for length in lengths)
        self._num_bytes += seen * 2 * config.num_kv_heads * config.head_dim * ops.kv_dtype.itemsize

    def _pass(self, q: Array, tables: Array, lengths: Array, kv: Array, out: Array) -> None:
        ops, config = self._built.ops, self._built.config
        scales = self._built.executor.model.weights.kv_scales
        with ops.scratch():
            plans = {
                window: ops.plan_decode_attention(
                    config.num_heads, AttentionBatch(kv, 0, tables, lengths, window=window, kv_scales=scales)
                )
                for window in dict.fromkeys(config.windows)
            }
            for layer, window in enumerate(config.windows):
                scale, plan = config.head_dim**-0.5, plans[window]
                batch = AttentionBatch(kv, layer, tables, lengths, scale, window, plan=plan, kv_scales=scales)
                with ops.scratch():
                    ops.paged_decode_attention(q, batch, out)
