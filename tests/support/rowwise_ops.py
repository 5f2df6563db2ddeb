"""NumPy's operations row by row, so that a sequence's results do not depend on its batch.

With e4m3 they would: another order of a sum changes a value's last bit, and so perhaps its rounding. Two runs then
differ only in what the engine did with blocks.
"""

from __future__ import annotations

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.quantised import dequantise
from model.ops.fp8 import widen
from model.ops.interface import AttentionBatch, Fp8Rows
from model.ops.weight import Weight

FLOAT32 = np.dtype(np.float32)
UINT8 = np.dtype(np.uint8)


class RowwiseOps(NumpyOps):
    """Activations in float32, the cache in e4m3."""

    def __init__(self, dtype: np.dtype = FLOAT32, kv_dtype: np.dtype | None = UINT8):
        super().__init__(dtype, kv_dtype)
        self._dense: dict[int, tuple[Weight, np.ndarray]] = {}

    def linear(self, x, weight, bias=None, *, dtype=None, out=None):
        rows = widen(x.data) * x.scale[:, None] if isinstance(x, Fp8Rows) else x.astype(FLOAT32, copy=False)
        product = np.matmul(rows[:, None], self._matrix(weight).T)[:, 0]  # T products of one row
        if bias is not None:
            product += bias
        if out is None:
            return product.astype(dtype or self.dtype, copy=False)
        out[...] = product
        return out

    def paged_decode_attention(self, q, batch, out):
        for s, length in enumerate(batch.context_lens):
            out[s] = self._attended(q[s], batch, s, int(length)) if length else 0

    def paged_prefill_attention(self, q, batch, out):
        for s, length in enumerate(batch.context_lens):
            first, end = batch.query_start[s], batch.query_start[s + 1]
            for row in range(first, end):
                out[row] = self._attended(q[row], batch, s, int(length - (end - row) + 1))

    def _matrix(self, weight: Weight) -> np.ndarray:
        """Return float32[N, K]; the weight is kept too, so that its id stays unique."""
        if id(weight.data) not in self._dense:
            self._dense[id(weight.data)] = (weight, np.ascontiguousarray(dequantise(weight)))
        return self._dense[id(weight.data)][1]

    def _attended(self, q: np.ndarray, batch: AttentionBatch, s: int, length: int) -> np.ndarray:
        """q [Hq, D] at position length - 1 -> [Hq, D]."""
        size, first = batch.kv.shape[4], max(0, length - batch.window)
        at = np.arange(first, length)
        stored = batch.kv[batch.block_tables[s, at // size], batch.layer, :, :, at % size]  # [n, 2, Hkv, D]
        wide = stored.astype(FLOAT32) if batch.kv_scales is None else widen(stored)
        if batch.kv_scales is not None:
            wide = wide * batch.kv_scales[batch.layer][None, :, :, None]
        keys, values = np.ascontiguousarray(wide.transpose(1, 2, 0, 3))  # [Hkv, n, D] each
        grouped = q.astype(FLOAT32, copy=False).reshape(len(keys), -1, q.shape[1])
        scores = np.einsum("hgd,hnd->hgn", grouped, keys) * np.float32(batch.scale)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("hgn,hnd->hgd", weights, values).reshape(q.shape)


class RowwiseAheadOps(RowwiseOps):
    """RowwiseOps that run ahead like a GPU: see AheadOps."""

    name = "cuda"

    def temporary(self, shape, dtype):
        return np.zeros(shape, dtype)
