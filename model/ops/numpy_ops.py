"""The specification: every op in plain NumPy, float32 inside, any of the three dtypes outside.

It runs anywhere, serves the demo model on a machine without a GPU, and is the twin each CUDA kernel is compared with.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import numpy as np

from model.ops.interface import Array, Bias, Penalties, Sampled, SamplingArrays
from model.ops.philox import gumbel_noise


class NumpyOps:
    """`Ops` on the CPU. Matrix products go to the BLAS that NumPy ships with."""

    name = "numpy"
    device_name = "CPU"

    def __init__(self, dtype: np.dtype = np.dtype(np.float32)):
        self.dtype = np.dtype(dtype)

    def upload(self, host: np.ndarray) -> Array:
        return np.array(host)

    def download(self, array: Array) -> np.ndarray:
        return np.array(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return np.zeros(shape, dtype)

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return np.empty(shape, dtype)

    def memory_bytes(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def scratch(self):
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def gather_rows(self, table: Array, ids: Array) -> Array:
        known = (ids >= 0) & (ids < len(table))
        rows = table[np.where(known, ids, 0)]
        rows[~known] = 0
        return rows

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return _normalised(_f32(x), weight, eps).astype(self.dtype, copy=False)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        residual[...] = _f32(residual) + _f32(x)
        normed = self.rms_norm(residual, weight, eps)
        if out is None:
            return normed
        out[...] = normed
        return out

    def linear(self, x: Array, weight: Array, bias: Array | None = None, *, dtype: np.dtype | None = None) -> Array:
        out = _f32(x) @ _f32(weight).T
        if bias is not None:
            out += _f32(bias)
        return out.astype(dtype or self.dtype, copy=False)

    def rope_kv_write(self, qkv, cos, sin, positions, slots, kv, layer, q_norm, k_norm, eps) -> Array:
        num_blocks, _, _, num_kv_heads, block_size, head_dim = kv.shape
        heads = _f32(qkv).reshape(len(qkv), -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        if q_norm is not None:
            q = _normalised(q, q_norm, eps)
        if k_norm is not None:
            k = _normalised(k, k_norm, eps)
        in_table = (positions >= 0) & (positions < len(cos))
        at = np.where(in_table, positions, 0)
        q, k = _rotated(q, cos[at], sin[at]), _rotated(k, cos[at], sin[at])
        q[~in_table] = 0

        written = in_table & (slots >= 0) & (slots < num_blocks * block_size)
        block, offset = np.divmod(slots[written], block_size)
        kv[block, layer, 0, :, offset] = k[written]
        kv[block, layer, 1, :, offset] = v[written]
        return q.astype(self.dtype, copy=False)

    def paged_decode_attention(self, q, kv, layer, block_tables, context_lens, scale, window, out) -> None:
        out[context_lens == 0] = 0
        for s, length in enumerate(context_lens):
            if length == 0:
                continue
            out[s : s + 1] = _attention(q[s : s + 1], kv, layer, block_tables[s], int(length), scale, window)

    def paged_prefill_attention(
        self, q, kv, layer, block_tables, context_lens, query_start, max_query_len, scale, window, out
    ) -> None:
        for s, length in enumerate(context_lens):
            rows = slice(query_start[s], query_start[s + 1])
            out[rows] = _attention(q[rows], kv, layer, block_tables[s], int(length), scale, window)

    def silu_mul(self, gate_up: Array) -> Array:
        gate, up = np.split(_f32(gate_up), 2, axis=1)
        return (gate / (1 + np.exp(-np.clip(gate, -80, None))) * up).astype(self.dtype, copy=False)

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        known = (sources >= 0) & (sources < len(kv)) & (targets >= 0) & (targets < len(kv))
        kv[targets[known]] = kv[sources[known]]

    def sample(self, logits: Array, how: SamplingArrays) -> Sampled:
        is_nan = np.isnan(logits).any(axis=1) | ~np.isfinite(logits).any(axis=1)
        adjusted = np.array(logits)
        if how.bias is not None:
            _add_bias(adjusted, how.bias)
        if how.penalties is not None:
            _penalise(adjusted, how.penalties)
        token_ids = np.zeros(len(logits), np.int32)
        for row in np.flatnonzero(~is_nan):
            token_ids[row] = _choose(adjusted[row], how, row)
        if not how.with_logprobs:
            return Sampled(token_ids, is_nan, None, None, None)
        logprobs = _log_softmax(logits)
        top_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, : how.num_logprobs].astype(np.int32)
        chosen = np.take_along_axis(logprobs, token_ids[:, None].astype(np.int64), axis=1)[:, 0]
        return Sampled(token_ids, is_nan, chosen, top_ids, np.take_along_axis(logprobs, top_ids, axis=1))


def _f32(array: Array) -> np.ndarray:
    return array.astype(np.float32, copy=False)


def _normalised(x: np.ndarray, weight: Array, eps: float) -> np.ndarray:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * _f32(weight)


def _rotated(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    low, high = np.split(heads, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attention(q, kv, layer, block_table, length, scale, window) -> np.ndarray:
    """q [n, Hq, D], the last n positions of a sequence of `length` cached tokens -> [n, Hq, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[4]
    first_key = max(0, length - num_queries + 1 - window) // block_size * block_size
    blocks = block_table[first_key // block_size : -(-length // block_size)]
    keys, values = (
        _f32(kv[blocks, layer, half]).swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : length - first_key]
        for half in (0, 1)
    )
    grouped = _f32(q).reshape(num_queries, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # [Hkv, group, n, D]
    scores = grouped @ keys[:, None].swapaxes(-1, -2) * np.float32(scale)
    query_at = np.arange(length - num_queries, length)[:, None]
    key_at = np.arange(first_key, length)[None, :]
    visible = (key_at <= query_at) & (key_at > query_at - window)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values[:, None]).transpose(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def _row_of(indptr: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def _add_bias(logits: np.ndarray, bias: Bias) -> None:
    known = (bias.token_ids >= 0) & (bias.token_ids < logits.shape[1])
    rows = _row_of(bias.indptr)[known]
    np.add.at(logits, (rows, bias.token_ids[known]), bias.values[known])


def _penalise(logits: np.ndarray, seen: Penalties) -> None:
    known = (seen.token_ids >= 0) & (seen.token_ids < logits.shape[1])
    rows, ids, counts = _row_of(seen.indptr)[known], seen.token_ids[known], seen.output_counts[known]
    values, factor = logits[rows, ids], seen.repetition[rows]
    values = np.where(values > 0, values / factor, values * factor)
    values -= seen.frequency[rows] * counts + seen.presence[rows] * (counts > 0)
    logits[rows, ids] = values


def _choose(logits: np.ndarray, how: SamplingArrays, row: int) -> int:
    """One row [V] -> token id."""
    temperature = how.temperature[row]
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits / temperature
    kept = np.flatnonzero(scaled > -np.inf)
    top_k = int(how.top_k[row])
    if top_k < len(kept):
        threshold = np.partition(scaled[kept], -top_k)[-top_k]
        kept = kept[scaled[kept] >= threshold]
    weights = np.exp((scaled[kept] - scaled[kept].max()).astype(np.float64))
    threshold = how.min_p[row] * weights.max()
    if how.top_p[row] < 1:
        descending = np.sort(weights)[::-1]
        mass = np.cumsum(descending)
        last = np.searchsorted(mass, how.top_p[row] * mass[-1])
        threshold = max(threshold, descending[min(last, len(descending) - 1)])
    kept = kept[weights >= threshold]
    noise = gumbel_noise(kept, int(how.seed[row]), int(how.position[row]), int(how.branch[row]))
    return int(kept[np.argmax(scaled[kept] + noise)])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
