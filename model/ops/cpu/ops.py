"""Specification of every op, in float32, and reference of each CUDA kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from model.dtypes import all_finite
from model.ops.adapter_interface import AdapterMatrix, AdapterRows, AsyncWrite
from model.ops.attention import rope_decode_attention
from model.ops.cpu import drafts, lora
from model.ops.cpu import sampling as numpy_sampling
from model.ops.cpu.device import NumpyDevice
from model.ops.cpu.experts import combine_experts, group_by_expert, route_experts
from model.ops.cpu.host_blocks import NumpyTransfer
from model.ops.cpu.quantised import linear_quantised
from model.ops.experts import add_norm_experts, gated_experts
from model.ops.fp8 import E4M3, narrow, quantise, widen
from model.ops.interface import (
    Array,
    AttentionBatch,
    DraftPlan,
    DraftRuns,
    ExpertGroups,
    Fp8Rows,
    HeadRotation,
    Routing,
    Sampled,
    SamplingArrays,
    TokenCandidates,
)
from model.ops.mlp import add_norm_gated_mlp, gated_mlp
from model.ops.norm import add_norm_linear
from model.ops.weight import ExpertWeights, Weight, WeightFormat

DECODE_GROUP, WIDE_GROUP = 16, 4
"""Sequences per decode attention, in float32 and float64: hides NumPy's call overhead, pads little, fits the cache."""

SHORT_QUERY = 17
"""Most rows of a sequence, such as a decode with drafts, that attend in groups."""

FLOAT32 = np.dtype(np.float32)


class NumpyOps(NumpyDevice):
    weight_formats = frozenset(WeightFormat)
    has_fp8 = True

    def __init__(self, dtype: np.dtype = FLOAT32, kv_dtype: np.dtype | None = None, num_sharing: int = 1):
        self.num_sharing = num_sharing
        self.dtype = np.dtype(dtype)
        self.kv_dtype = np.dtype(dtype if kv_dtype is None else kv_dtype)

    def find_nonfinite(self, x: Array, found: Array) -> None:
        if not all_finite(x.view(E4M3) if x.dtype == np.uint8 else x):
            found[0] = 1

    def gather_rows(self, table: Array, ids: Array) -> Array:
        known = (ids >= 0) & (ids < len(table))
        rows = table[np.where(known, ids, 0)]
        rows[~known] = 0
        return rows

    def place_columns(self, x: Array, out: Array, first: int) -> None:
        out[:, first : first + x.shape[1]] = x

    def pick_tokens(self, token_ids: Array, previous: Array, source: Array) -> None:
        known = (source >= 0) & (source < len(previous))
        token_ids[known] = previous[source[known]]

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return _normalised(_f32(x), weight, eps).astype(self.dtype, copy=False)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        residual[...] = _f32(residual) + _f32(x)
        normed = self.rms_norm(residual, weight, eps)
        if out is None:
            return normed
        out[...] = normed
        return out

    def linear(
        self,
        x: Array | Fp8Rows,
        weight: Weight,
        bias: Array | None = None,
        *,
        dtype: np.dtype | None = None,
        out: Array | None = None,
    ) -> Array:
        product = (
            _product(_f32(x), _f32(weight.data)) if weight.format is WeightFormat.DENSE else linear_quantised(x, weight)
        )
        if bias is not None:
            product += _f32(bias)
        if out is None:
            return product.astype(dtype or self.dtype, copy=False)
        out[...] = product
        return out

    def add_norm_linear(
        self,
        x: Array,
        residual: Array,
        norm: tuple[Array, float],
        weight: Weight,
        bias: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        return add_norm_linear(self, (x, residual), norm, (weight, bias), out)

    def prepare_weight(self, weight: Weight) -> Weight:
        """Store a dense matrix by columns, so that BLAS multiplies a few rows without repacking it.

        Stacks of experts are not transposed: they gain nothing, and it takes 0.2 s per matrix of Qwen3-30B-A3B.
        """
        if weight.format is not WeightFormat.DENSE or weight.data.ndim == 3:
            return weight
        return replace(weight, data=np.asfortranarray(weight.data))

    def tune_linear(
        self, weights: Sequence[Weight], bias: Array | None, num_rows: Sequence[int], *, dtype: np.dtype | None = None
    ) -> None:
        """Do nothing: NumPy has one algorithm."""

    def linear_sizes(self, most: int) -> list[int]:
        return []

    def rope_kv_write(
        self,
        qkv: Array,
        rotation: HeadRotation,
        positions: Array,
        slots: Array,
        kv: Array,
        layer: int,
        kv_scales: Array | None = None,
    ) -> Array:
        num_blocks, _, _, num_kv_heads, block_size, head_dim = kv.shape
        heads = _f32(qkv).reshape(len(qkv), -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
        if rotation.q_norm is not None:
            q = _normalised(q, rotation.q_norm, rotation.eps)
        if rotation.k_norm is not None:
            k = _normalised(k, rotation.k_norm, rotation.eps)
        cos, sin = rotation.cos, rotation.sin
        in_table = (positions >= 0) & (positions < len(cos))
        at = np.where(in_table, positions, 0)
        row_cos, row_sin = cos[at][:, None], sin[at][:, None]
        q, k = _rotated(q, row_cos, row_sin), _rotated(k, row_cos, row_sin)
        q[~in_table] = 0

        written = in_table & (slots >= 0) & (slots < num_blocks * block_size)
        block, offset = np.divmod(slots[written], block_size)
        for side, rows in enumerate((k[written], v[written])):
            kv[block, layer, side, :, offset] = (
                rows if kv_scales is None else self._narrow(rows, kv_scales[layer, side])
            )
        return q.astype(self.dtype, copy=False)

    def _narrow(self, heads: np.ndarray, scales: Array) -> np.ndarray:
        """heads float32[n, Hkv, D], scales float32[Hkv] -> e4m3 bits as uint8[n, Hkv, D]."""
        return narrow(_f32(heads.astype(self.dtype, copy=False)) / scales[:, None])

    def normalise_qk(self, qkv: Array, q_norm: Array, k_norm: Array, eps: float) -> None:
        q, k = np.split(qkv, [len(q_norm), len(q_norm) + len(k_norm)], axis=1)[:2]
        q[...], k[...] = _normalised(_f32(q), q_norm, eps), _normalised(_f32(k), k_norm, eps)

    def exact_rows(self) -> AbstractContextManager[None]:
        return nullcontext()

    def plan_decode_attention(self, num_heads: int, batch: AttentionBatch) -> None:
        return None

    def rope_decode_attention(
        self,
        qkv: Array,
        rotation: HeadRotation,
        positions: Array,
        slots: Array,
        batch: AttentionBatch,
    ) -> Array:
        return rope_decode_attention(self, qkv, rotation, (positions, slots), batch)

    def paged_decode_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        lens = batch.context_lens
        out[lens == 0] = 0
        by_length = np.argsort(lens)[np.count_nonzero(lens == 0) :]
        group_size = WIDE_GROUP if batch.rounds_output else DECODE_GROUP
        for start in range(0, len(by_length), group_size):
            rows = by_length[start : start + group_size]
            out[rows] = _attention(q[rows, None], batch, rows)[:, 0]

    def paged_prefill_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        starts: Array = batch.query_start
        lengths = np.diff(starts)
        for s in np.flatnonzero(lengths > SHORT_QUERY):
            rows = slice(starts[s], starts[s + 1])
            out[rows] = _attention(q[None, rows], batch, np.array([s]))[0]
        for length in np.unique(lengths[(lengths > 0) & (lengths <= SHORT_QUERY)]):
            alike = np.flatnonzero(lengths == length)
            alike = alike[np.argsort(batch.context_lens[alike])]
            for start in range(0, len(alike), DECODE_GROUP):
                group = alike[start : start + DECODE_GROUP]
                at = starts[group][:, None] + np.arange(length)
                out[at] = _attention(q[at], batch, group)

    def silu_mul(self, gate_up: Array) -> Array:
        size = gate_up.shape[1] // 2
        gate, up = _f32(gate_up[:, :size]), _f32(gate_up[:, size:])
        return (gate / (1 + np.exp(-np.clip(gate, -80, None))) * up).astype(self.dtype, copy=False)

    def quantise_rows(self, x: Array, out: Fp8Rows | None = None) -> Fp8Rows:
        rows = Fp8Rows(*quantise(_f32(x)))
        if out is None:
            return rows
        out.data[...], out.scale[...] = rows.data, rows.scale
        return out

    def dequantise_rows(self, x: Fp8Rows) -> Array:
        return (widen(x.data) * x.scale[:, None]).astype(self.dtype, copy=False)

    def rms_norm_quantised(self, x: Array, weight: Array, eps: float) -> Fp8Rows:
        return self.quantise_rows(self.rms_norm(x, weight, eps))

    def add_rms_norm_quantised(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Fp8Rows | None = None
    ) -> Fp8Rows:
        return self.quantise_rows(self.add_rms_norm(x, residual, weight, eps), out)

    def silu_mul_quantised(self, gate_up: Array) -> Fp8Rows:
        return self.quantise_rows(self.silu_mul(gate_up))

    def gated_mlp(self, x: Array | Fp8Rows, gate_up: Weight, down: Weight) -> Array:
        return gated_mlp(self, x, gate_up, down)

    def add_norm_gated_mlp(
        self, x: Array, residual: Array, norm: tuple[Array, float], gate_up: Weight, down: Weight
    ) -> Array:
        return add_norm_gated_mlp(self, (x, residual), norm, gate_up, down)

    def draft_input(
        self, token_ids: Array, table: Array, hidden: Array, weights: tuple[Array, Array], eps: float
    ) -> Array:
        embedded = self.rms_norm(self.gather_rows(table, token_ids), weights[0], eps)
        return np.concatenate([embedded, self.rms_norm(hidden, weights[1], eps)], axis=1)

    def plan_drafts(self, sampled: Array, rows: tuple[Array, Array], runs: DraftRuns, out: DraftPlan) -> None:
        drafts.plan_drafts(sampled, rows, runs, out)

    def spread_logits(self, logits: Array, columns: Array) -> Array:
        return drafts.spread_logits(logits, columns)

    def lora_tile_rows(self, num_rows: int) -> int:
        return max(1, num_rows)  # one product for each adapter

    def write_slot_async(
        self,
        values_of: Callable[[int], Iterable[tuple[Array, Array]]],
        slot: int,
        last_slot: int,
        memory: tuple[str, np.ndarray],
        *,
        is_unused: bool = False,
    ) -> AsyncWrite:
        return self.write_async(values_of(slot))

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        return lambda: None

    def write_async(self, values: Iterable[tuple[Array, Array]], *, is_unused: bool = False) -> AsyncWrite:
        begin_s = time.perf_counter()
        for array, host in values:
            array[...] = host
        return NumpyTransfer(time.perf_counter() - begin_s)

    def lora_linear(
        self, x: Array | Fp8Rows, weight: Weight, bias: Array | None, matrix: AdapterMatrix, adapters: AdapterRows
    ) -> Array | None:
        return None

    def lora_shrink(self, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> Array:
        return lora.shrink(_f32(x), matrix, adapters)

    def lora_expand(self, shrunk: Array, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
        lora.expand(shrunk, matrix, adapters, out)

    def lora_add(
        self,
        x: Array,
        matrix: AdapterMatrix,
        slots: Array,
        out: Array,
        groups: ExpertGroups | None = None,
        *,
        is_sorted: bool = False,
    ) -> None:
        lora.add(_f32(x), matrix, slots, out, groups, is_sorted)

    def route_experts(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, Array]:
        return route_experts(logits, num_used, renormalise, slots, num_slots)

    def group_by_expert(self, ids: Array, num_experts: int) -> ExpertGroups:
        return group_by_expert(ids, num_experts)

    def route_to_groups(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, ExpertGroups]:
        ids, weights = self.route_experts(logits, num_used, renormalise, slots, num_slots)
        return weights, self.group_by_expert(ids, logits.shape[1])

    def experts_linear(
        self, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, *, is_sorted: bool = False
    ) -> Array:
        """Loop over the experts in use. As in `linear`, a row's last bits may depend on the number of rows of its
        expert."""
        out = np.empty((len(groups.rows), weight.shape[0]), self.dtype)
        for expert in np.flatnonzero(np.diff(groups.offsets)):
            pairs = slice(groups.offsets[expert], groups.offsets[expert + 1])
            rows = pairs if is_sorted else groups.rows[pairs]
            picked = Fp8Rows(x.data[rows], x.scale[rows]) if isinstance(x, Fp8Rows) else x[rows]
            self.linear(picked, weight.expert(int(expert)), out=out[pairs])
        out[groups.offsets[-1] :] = 0  # padding
        return out

    def combine_experts(self, x: Array, groups: ExpertGroups, weights: Array) -> Array:
        return combine_experts(x, groups, weights).astype(self.dtype, copy=False)

    def add_norm_experts(
        self, x: Array, residual: Array, weight: Array, eps: float, experts: ExpertWeights, routing: Routing
    ) -> Array:
        return add_norm_experts(self, (x, residual), (weight, eps), experts, routing)

    def gated_experts(self, x: Array, gate_up: Weight, down: Weight, groups: ExpertGroups, weights: Array) -> Array:
        return gated_experts(self, x, (gate_up, down), groups, weights)

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        known = (sources >= 0) & (sources < len(kv)) & (targets >= 0) & (targets < len(kv))
        kv[targets[known]] = kv[sources[known]]

    def sample(self, logits: Array, params: SamplingArrays, out: Array | None = None) -> Sampled:
        return numpy_sampling.sample(logits, params, out)

    def sample_part(self, logits: Array, params: SamplingArrays, first_token: int) -> TokenCandidates:
        return numpy_sampling.sample_part(logits, params, first_token)

    def top_logprobs(self, logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
        return numpy_sampling.top_logprobs(logits, token_ids, num_best)


def _f32(array: Array) -> np.ndarray:
    floats: np.ndarray = array.astype(np.float32, copy=False)
    return floats


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [M, K], weight [N, K] -> [M, N]."""
    if len(x) == 1 or weight.flags.f_contiguous:
        product: np.ndarray = x @ weight.T
        return product
    return np.ascontiguousarray((weight @ np.ascontiguousarray(x.T)).T)  # repacks x, not a tied head


def _normalised(x: np.ndarray, weight: Array, eps: float) -> np.ndarray:
    mean_square = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
    normed: np.ndarray = x / np.sqrt(mean_square + np.float32(eps)) * _f32(weight)
    return normed


def _rotated(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@np.errstate(invalid="ignore")
def _attention(q: Array, batch: AttentionBatch, sequences: np.ndarray) -> np.ndarray:
    """Attend with q [S, n, Hq, D], the last n positions of S `sequences` -> [S, n, Hq, D].

    Sequences are padded to the longest; masked keys may be anything, NaN included.
    """
    kv, layer, window = batch.kv, batch.layer, batch.window
    block_tables, context_lens = batch.block_tables[sequences], batch.context_lens[sequences]
    num_sequences, num_queries, _, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[4]
    first_block = np.maximum(0, context_lens - num_queries + 1 - window) // block_size
    num_blocks = int((-(-context_lens // block_size) - first_block).max())
    columns = first_block[:, None] + np.arange(num_blocks)
    blocks = np.take_along_axis(block_tables, np.minimum(columns, block_tables.shape[1] - 1), axis=1)
    heads = np.arange(num_kv_heads)[:, None]
    keys, values = (
        _cached(kv[blocks[:, None], layer, side, heads], batch, side).reshape(num_sequences, num_kv_heads, -1, head_dim)
        for side in (0, 1)
    )
    key_at = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(num_sequences, 1, -1)
    query_at = (context_lens[:, None] - num_queries + np.arange(num_queries))[:, :, None]
    visible = (key_at <= query_at) & (key_at > query_at - window)  # [S, n, keys]
    values.swapaxes(1, 2)[~visible.any(axis=1)] = 0  # 0 * NaN is NaN: see _weighed

    if batch.rounds_output:
        q, keys, values = (array.astype(np.float64) for array in (q, keys, values))
    # [S, Hkv, D, (Hq / Hkv) * n]: BLAS is faster at keys @ queries
    by_head = (q if batch.rounds_output else _f32(q)).reshape(num_sequences, num_queries, num_kv_heads, -1, head_dim)
    queries = by_head.transpose(0, 2, 4, 3, 1).reshape(num_sequences, num_kv_heads, head_dim, -1)
    scores = np.ascontiguousarray((keys @ queries).swapaxes(-1, -2)) * np.float32(batch.scale)
    grouped = (num_sequences, num_kv_heads, -1, num_queries, scores.shape[-1])
    scores = np.where(visible[:, None, None], scores.reshape(grouped), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return _weighed(values, weights, visible).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _cached(blocks: Array, batch: AttentionBatch, side: int) -> np.ndarray:
    """Return blocks [S, Hkv, num_blocks, B, D] of a layer's `side` in float32."""
    if batch.kv_scales is None:
        return _f32(blocks)
    scales: np.ndarray = batch.kv_scales[batch.layer, side][:, None, None, None]
    values: np.ndarray = widen(blocks) * scales
    return values


def _weighed(values: np.ndarray, weights: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """values [S, Hkv, keys, D], weights [S, Hkv, Hq / Hkv, n, keys], 0 unless `visible` [S, n, keys] -> [S, Hkv, Hq /
    Hkv, n, D].

    A non-finite value is left out of the product, where 0 times it would be NaN, and added to the queries that see it.
    """
    flat = (*weights.shape[:2], -1, weights.shape[-1])
    shape = (*weights.shape[:-1], values.shape[-1])
    weighed: np.ndarray = (weights.reshape(flat) @ values).reshape(shape)
    if shape[3] == 1 or np.isfinite(weighed).all():
        return weighed
    broken = np.flatnonzero(~np.isfinite(values).all(axis=(0, 1, 3)))
    lost = values[:, :, broken]
    values[:, :, broken] = 0
    weighed = (weights.reshape(flat) @ values).reshape(shape)
    for at, key in enumerate(broken):
        part = weights[..., key, None] * lost[:, :, None, None, at]
        weighed += np.where(visible[:, None, None, :, key, None], part, 0)
    return weighed
