"""GPU operations: check arguments and launch kernels."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.attention import rope_decode_attention
from model.ops.cpu.quantised import dequantise
from model.ops.experts import add_norm_experts, gated_experts
from model.ops.gpu import drafts
from model.ops.gpu.adapters import launches as lora
from model.ops.gpu.adapters import pairs
from model.ops.gpu.adapters.product import AdaptedProduct
from model.ops.gpu.adapters.writes import AsyncWriter, CudaWrite
from model.ops.gpu.attention.paged import decode_attention, kv_build, plan_decode_attention, prefill_attention
from model.ops.gpu.attention.rotated_decode import rotate_and_decode, should_rotate
from model.ops.gpu.device import DTYPE_CODES, THREADS, CudaDevice, expect
from model.ops.gpu.experts.fused import can_gate, gate_and_sum
from model.ops.gpu.experts.launches import combine_experts, group_by_expert, route_experts, route_to_groups
from model.ops.gpu.experts.one_row import MAX_WORDS, can_take_row, experts_of_row
from model.ops.gpu.experts.products import dequantised_stack, experts_linear, pack_stack
from model.ops.gpu.fp8 import Fp8Linear, as_weight, expect_fp8, quantised_by, silu_mul_quantised
from model.ops.gpu.int4 import linear as int4
from model.ops.gpu.linear import Linear
from model.ops.gpu.norm import add_rms_norm, normalise_qk, rms_norm
from model.ops.gpu.product_sizes import all_planned_rows
from model.ops.gpu.sampling import sample, top_logprobs
from model.ops.gpu.w8 import linear as w8
from model.ops.int4 import can_tile
from model.ops.interface import (
    MAX_EXACT_ROWS,
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
)
from model.ops.mlp import add_norm_gated_mlp, gated_mlp, takes_fp8
from model.ops.norm import add_norm_linear
from model.ops.weight import ExpertWeights, Weight, WeightFormat

_VEC_BYTES = 16
_FIND_BLOCKS_PER_SM = 8
_COPY_VECS_PER_THREAD = 4  # VECS_PER_THREAD of copy_blocks.cu
_UINT8 = np.dtype(np.uint8)
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)
_log = logging.getLogger(__name__)


class CudaOps(CudaDevice):
    """`Ops` on the current CUDA device, for one thread. Arrays are CuPy's, C-contiguous."""

    weight_formats = frozenset(WeightFormat)

    def __init__(self, dtype: np.dtype, kv_dtype: np.dtype | None = None):
        """Raise ValueError for dtypes without kernels, or CuPy's RuntimeErrors without a GPU."""
        super().__init__(dtype, kv_dtype)
        self._linear = Linear(self)
        self._linear_w8 = w8.W8Linear(self, self._linear)
        self._linear_fp8 = Fp8Linear(self, self._linear_w8)
        self._linear_int4 = int4.Int4Linear(self, self._linear)
        self._adapted_product = AdaptedProduct(self)
        self._writer: AsyncWriter | None = None  # created when adapters need it
        self._is_exact = False
        # workspace of experts_row
        self._exchange = self.upload(np.zeros(MAX_WORDS, np.uint64)), self.upload(np.zeros(self.num_sms, np.uint32))

    def exact_rows(self) -> AbstractContextManager[None]:
        return self._exact_rows()

    @contextmanager
    def _exact_rows(self) -> Iterator[None]:
        self._is_exact = True
        try:
            yield
        finally:
            self._is_exact = False

    def find_nonfinite(self, x: Array, found: Array) -> None:
        is_e4m3 = x.dtype == _UINT8
        expect("x", x, _UINT8 if is_e4m3 else self.dtype, *x.shape)
        expect("found", found, _INT32, 1)
        num_blocks = min(_FIND_BLOCKS_PER_SM * self.num_sms, math.ceil(x.nbytes / (THREADS * _VEC_BYTES)))
        self.launch("find_nonfinite", (num_blocks,), (x, found, np.int64(x.size)), E4M3=int(is_e4m3))

    def gather_rows(self, table: Array, ids: Array) -> Array:
        dtype = _FLOAT32 if table.dtype == _FLOAT32 else self.dtype
        expect("table", table, dtype, None, None)
        expect("ids", ids, _INT32, None)
        num_rows, width = table.shape
        out = self.temporary((len(ids), width), dtype)
        args = (table, ids, out, np.int32(num_rows), np.int32(width))
        self.launch("gather_rows", (len(ids),), args, overlaps=True, QUIRE_DTYPE=DTYPE_CODES[dtype])
        return out

    def place_columns(self, x: Array, out: Array, first: int) -> None:
        drafts.place_columns(self, x, out, first)

    def pick_tokens(self, token_ids: Array, previous: Array, source: Array) -> None:
        expect("token_ids", token_ids, _INT32, None)
        expect("previous", previous, _INT32, None)
        expect("source", source, _INT32, len(token_ids))
        sizes = np.int32(len(token_ids)), np.int32(len(previous))
        self.launch("pick_tokens", (math.ceil(len(token_ids) / THREADS),), (token_ids, previous, source, *sizes))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("weight", weight, self.dtype, width)
        return rms_norm(self, x, weight, eps)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("residual", residual, self.dtype, rows, width)
        expect("weight", weight, self.dtype, width)
        if out is None:
            out = self.temporary(x.shape, self.dtype)
        expect("out", out, self.dtype, rows, width)
        add_rms_norm(self, x, residual, weight, eps, out)
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
        n, k = weight.shape
        rows = self._expect_operands(x, weight)
        if bias is not None:
            expect("bias", bias, self.dtype, n)
        if out is None:
            out = self.temporary((rows, n), self.dtype if dtype is None else dtype)
        expect("out", out, out.dtype, rows, n)
        if out.dtype not in (self.dtype, _FLOAT32) or k == 0:
            raise ValueError(f"linear: [{rows}, {k}] {self.dtype} by [{n}, {k}] to {out.dtype} is not supported")
        if out.size == 0:
            return out
        if isinstance(x, Fp8Rows):
            self._linear_fp8(x, weight, bias, out)
        elif weight.format in w8.FORMATS:
            self._linear_w8(x, weight, bias, out)
        elif weight.format is WeightFormat.INT4_TILED:
            self._linear_int4(x, weight, bias, out, exact=self._is_exact)
        else:
            self._linear(x, weight.data, bias, out, exact=self._is_exact)
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
        n = weight.shape[0]
        if weight.format is WeightFormat.DENSE:
            can_norm = self._linear.can_norm(x, residual, weight.data, bias, out)
        else:
            can_norm = self._linear_int4.can_norm(x, residual, weight)
        if not can_norm:
            return add_norm_linear(self, (x, residual), norm, (weight, bias), out)
        self._expect_normed(x, residual, norm[0], weight)
        if bias is not None:
            expect("bias", bias, self.dtype, n)
        if out is None:
            out = self.temporary((1, n), self.dtype)
        expect("out", out, self.dtype, 1, n)
        if weight.format is WeightFormat.DENSE:
            self._linear.add_norm((x, residual), norm, weight.data, bias, out)
        else:
            self._linear_int4.add_norm((x, residual), norm, weight, bias, out)
        return out

    def prepare_weight(self, weight: Weight) -> Weight:
        if weight.format in w8.FORMATS:
            return self._linear_w8.prepare(weight)
        if weight.format in (WeightFormat.DENSE, WeightFormat.INT4_TILED):
            return weight
        is_stack = weight.data.ndim == 3
        if (
            weight.format is WeightFormat.INT4
            and can_tile(weight)
            and not (is_stack and weight.input_order is not None)
        ):
            return pack_stack(weight, self._linear_int4.pack) if is_stack else self._linear_int4.pack(weight)
        if self.kernels.are_compiled_ahead:
            return Weight(self.empty((*weight.data.shape[:-2], *weight.shape), self.dtype))
        _log.info("weights [%d, %d] in %s: no kernel, dequantised to %s", *weight.shape, weight.format, self.dtype.name)
        on_host = replace(
            weight,
            data=self.download(weight.data),
            scale=self._downloaded(weight.scale),
            zero_point=self._downloaded(weight.zero_point),
            input_order=self._downloaded(weight.input_order),
        )
        if is_stack:
            return Weight(self.upload(dequantised_stack(on_host, self.dtype)))
        return Weight(self.upload(dequantise(on_host).astype(self.dtype)))

    def tune_linear(
        self,
        weights: Sequence[Weight],
        bias: Array | None,
        num_rows: Sequence[int],
        *,
        dtype: np.dtype | None = None,
    ) -> None:
        """Measure for about 30 ms per row count; results are kept on disk.

        FP8 weights with e4m3 inputs need none: the row count chooses the kernel. Other quantised weights are measured
        for row counts that multiply by 16-bit copies.
        """
        first = weights[0]
        if first.format is WeightFormat.INT4_TILED:
            self._tune_widened(first, self._linear_int4.unpack, bias, num_rows, int4.MAX_FUSED_ROWS, dtype)
            return
        if first.format in w8.FORMATS and not (first.format is WeightFormat.FP8 and first.quantised_input):
            self._tune_widened(first, partial(w8.dequantise_weight, self), bias, num_rows, w8.MAX_FUSED_ROWS, dtype)
            return
        dense = [weight.data for weight in weights if weight.format is WeightFormat.DENSE]
        for weight in dense:
            expect("weight", weight, self.dtype, *weights[0].shape)
        if dense:
            self._linear.tune(dense, bias, num_rows, self.dtype if dtype is None else np.dtype(dtype))

    def _tune_widened(
        self,
        weight: Weight,
        widen: Callable[[Weight], Array],
        bias: Array | None,
        num_rows: Sequence[int],
        most_fused: int,
        dtype: np.dtype | None,
    ) -> None:
        many = [rows for rows in num_rows if rows > most_fused]
        with self.scratch():
            self.tune_linear([Weight(widen(weight))], bias, many, dtype=dtype)

    def linear_sizes(self, most: int) -> list[int]:
        return all_planned_rows(most)

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
        self._expect_rotation(qkv, rotation, positions, slots, kv, layer, kv_scales)
        num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        rows, max_len = len(qkv), len(rotation.cos)
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        lanes = head_dim * self.dtype.itemsize // (2 * _VEC_BYTES)
        heads_per_block = THREADS >> (lanes - 1).bit_length()
        out = self.temporary((rows, num_heads, head_dim), self.dtype)
        sizes = (rows, num_heads, num_kv_heads, num_blocks, num_layers, layer, max_len)
        tables = (qkv, rotation.cos, rotation.sin, positions, slots, kv, rotation.q_norm, rotation.k_norm, out)
        self.launch(
            "rope_kv_write",
            (math.ceil(rows * (num_heads + 2 * num_kv_heads) / heads_per_block),),
            (*tables, *map(np.int32, sizes), np.float32(rotation.eps), kv_scales),
            overlaps=True,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            **kv_build(kv),
        )
        return out

    def normalise_qk(self, qkv: Array, q_norm: Array, k_norm: Array, eps: float) -> None:
        expect("qkv", qkv, self.dtype, None, None)
        expect("q_norm", q_norm, self.dtype, None)
        expect("k_norm", k_norm, self.dtype, None)
        if qkv.shape[1] != len(q_norm) + 2 * len(k_norm):
            norms = f"norms of {len(q_norm)} and {len(k_norm)}"
            raise ValueError(f"normalise_qk: {qkv.shape[1]} columns and {norms} do not go together")
        normalise_qk(self, qkv, q_norm, k_norm, eps)

    def plan_decode_attention(self, num_heads: int, batch: AttentionBatch) -> Array:
        expect("context_lens", batch.context_lens, _INT32, None)
        expect("block_tables", batch.block_tables, _INT32, len(batch.context_lens), None)
        return plan_decode_attention(self, num_heads, self._made_exact(batch))

    def rope_decode_attention(
        self,
        qkv: Array,
        rotation: HeadRotation,
        positions: Array,
        slots: Array,
        batch: AttentionBatch,
    ) -> Array:
        self._expect_rotation(qkv, rotation, positions, slots, batch.kv, batch.layer, batch.kv_scales)
        expect("context_lens", batch.context_lens, _INT32, len(qkv))
        expect("block_tables", batch.block_tables, _INT32, len(qkv), None)
        made_exact = self._made_exact(batch)
        if not should_rotate(self, qkv, made_exact):
            return rope_decode_attention(self, qkv, rotation, (positions, slots), batch)
        return rotate_and_decode(self, qkv, rotation, (positions, slots), made_exact)

    def paged_decode_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        self._expect_attention(q, batch, out)
        expect("q", q, self.dtype, len(batch.context_lens), None, None)
        decode_attention(self, q, self._made_exact(batch), out)

    def paged_prefill_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        self._expect_attention(q, batch, out)
        if batch.query_start is None:
            raise ValueError("paged_prefill_attention: query_start is missing (int32[S + 1])")
        expect("query_start", batch.query_start, _INT32, len(batch.context_lens) + 1)
        prefill_attention(self, q, batch, out)

    def silu_mul(self, gate_up: Array) -> Array:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        expect("gate_up", gate_up, self.dtype, rows, 2 * width)
        out = self.temporary((rows, width), self.dtype)
        columns = math.ceil(width / (THREADS * _VEC_BYTES // self.dtype.itemsize))
        self.launch("silu_mul", (rows, columns), (gate_up, out, np.int32(width)), overlaps=True)
        return out

    def quantise_rows(self, x: Array, out: Fp8Rows | None = None) -> Fp8Rows:
        expect("x", x, self.dtype, None, None)
        return quantised_by(self, "quantise_rows", (x,), *x.shape, out=out)

    def dequantise_rows(self, x: Fp8Rows) -> Array:
        expect_fp8("x", x)
        return w8.dequantise_weight(self, as_weight(x))

    def rms_norm_quantised(self, x: Array, weight: Array, eps: float) -> Fp8Rows:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("weight", weight, self.dtype, width)
        return quantised_by(self, "rms_norm_quantised", (x, weight), rows, width, np.float32(eps))

    def add_rms_norm_quantised(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Fp8Rows | None = None
    ) -> Fp8Rows:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("residual", residual, self.dtype, rows, width)
        expect("weight", weight, self.dtype, width)
        args = (x, residual, weight)
        return quantised_by(self, "add_rms_norm_quantised", args, rows, width, np.float32(eps), out=out)

    def silu_mul_quantised(self, gate_up: Array) -> Fp8Rows:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        expect("gate_up", gate_up, self.dtype, rows, 2 * width)
        return silu_mul_quantised(self, gate_up)

    def gated_mlp(self, x: Array | Fp8Rows, gate_up: Weight, down: Weight) -> Array:
        self._expect_operands(x, gate_up)
        if down.format in w8.FORMATS:
            w8.expect_w8(down)
        if isinstance(x, Fp8Rows):
            fused = self._linear_fp8.gated_mlp(x, gate_up, down)
            if fused is not None:
                return fused
        elif gate_up.format is WeightFormat.INT4_TILED:
            gated = self._linear_int4.gated(x, gate_up)
            if gated is not None:
                return self.linear(gated, down)
        elif self._is_exact and len(x) > 1 and gate_up.format is WeightFormat.DENSE and not takes_fp8(self, down):
            gated = self.temporary((len(x), gate_up.shape[0] // 2), self.dtype)
            if self._linear.gated(x, gate_up.data, gated):
                return self.linear(gated, down)
        return gated_mlp(self, x, gate_up, down)

    def add_norm_gated_mlp(
        self, x: Array, residual: Array, norm: tuple[Array, float], gate_up: Weight, down: Weight
    ) -> Array:
        if gate_up.format is WeightFormat.INT4_TILED:
            if self._linear_int4.can_norm(x, residual, gate_up):
                self._expect_normed(x, residual, norm[0], gate_up)
                gated = self._linear_int4.gated(x, gate_up, (residual, *norm))
                if gated is not None:
                    return self.linear(gated, down)
            return self.gated_mlp(self.add_rms_norm(x, residual, *norm), gate_up, down)
        return add_norm_gated_mlp(self, (x, residual), norm, gate_up, down)

    def route_experts(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, Array]:
        return route_experts(self, logits, (num_used, renormalise), slots, num_slots)

    def group_by_expert(self, ids: Array, num_experts: int) -> ExpertGroups:
        return group_by_expert(self, ids, num_experts)

    def route_to_groups(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, ExpertGroups]:
        return route_to_groups(self, logits, (num_used, renormalise), slots, num_slots)

    def experts_linear(
        self, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, *, is_sorted: bool = False
    ) -> Array:
        return experts_linear(self, x, weight, groups, is_sorted)

    def combine_experts(self, x: Array, groups: ExpertGroups, weights: Array) -> Array:
        return combine_experts(self, x, groups, weights)

    def draft_input(
        self, token_ids: Array, table: Array, hidden: Array, weights: tuple[Array, Array], eps: float
    ) -> Array:
        return drafts.draft_input(self, token_ids, table, hidden, weights, eps)

    def plan_drafts(self, sampled: Array, rows: tuple[Array, Array], runs: DraftRuns, out: DraftPlan) -> None:
        drafts.plan_drafts(self, sampled, rows, runs, out)

    def spread_logits(self, logits: Array, columns: Array) -> Array:
        return drafts.spread_logits(self, logits, columns)

    def lora_tile_rows(self, num_rows: int) -> int:
        return lora.tile_rows(num_rows)

    def lora_linear(
        self, x: Array | Fp8Rows, weight: Weight, bias: Array | None, matrix: AdapterMatrix, adapters: AdapterRows
    ) -> Array | None:
        return None if self._is_exact else self._adapted_product(x, weight, bias, matrix, adapters)

    def lora_shrink(self, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> Array:
        return lora.shrink(self, x, matrix, adapters)

    def lora_expand(self, shrunk: Array, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
        lora.expand(self, shrunk, matrix, adapters, out)

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
        pairs.add(self, x, matrix, slots, out, groups, is_sorted)

    def write_async(self, values: Iterable[tuple[Array, Array]], *, is_unused: bool = False) -> CudaWrite:
        return self._open_writer().start(values, is_unused=is_unused)

    def write_slot_async(
        self,
        values_of: Callable[[int], Iterable[tuple[Array, Array]]],
        slot: int,
        last_slot: int,
        memory: tuple[str, np.ndarray],
        *,
        is_unused: bool = False,
    ) -> CudaWrite:
        return self._open_writer().start_slot(values_of, slot, last_slot, memory, is_unused=is_unused)

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        return self._open_writer().pin(memory)

    def _open_writer(self) -> AsyncWriter:
        if self._writer is None:
            self._writer = AsyncWriter(self.stream)
        return self._writer

    def add_norm_experts(
        self, x: Array, residual: Array, weight: Array, eps: float, experts: ExpertWeights, routing: Routing
    ) -> Array:
        sums, norm = (x, residual), (weight, eps)
        if can_take_row(self, x, experts, routing):
            return experts_of_row(self, sums, norm, experts, routing, self._exchange)
        return add_norm_experts(self, sums, norm, experts, routing)

    def gated_experts(self, x: Array, gate_up: Weight, down: Weight, groups: ExpertGroups, weights: Array) -> Array:
        if can_gate(self, gate_up, down, groups):
            return gate_and_sum(self, x, (gate_up, down), groups, weights)
        return gated_experts(self, x, (gate_up, down), groups, weights)

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        expect("kv", kv, self.kv_dtype, *kv.shape)
        expect("sources", sources, _INT32, len(sources))
        expect("targets", targets, _INT32, len(sources))
        block_bytes = math.prod(kv.shape[1:]) * self.kv_dtype.itemsize
        if block_bytes % _VEC_BYTES:
            raise ValueError(f"blocks of {block_bytes} bytes cannot be copied in pieces of {_VEC_BYTES}")
        vecs = block_bytes // _VEC_BYTES
        num_chunks = math.ceil(vecs / (THREADS * _COPY_VECS_PER_THREAD))
        sizes = map(np.int32, (len(kv), vecs, num_chunks))
        self.launch("copy_blocks", (len(sources) * num_chunks,), (kv, sources, targets, *sizes))

    def sample(self, logits: Array, params: SamplingArrays, out: Array | None = None) -> Sampled:
        expect("logits", logits, _FLOAT32, len(params.temperature), None)
        if out is not None:
            expect("out", out, _INT32, len(logits))
        return sample(self, logits, params, out)

    def top_logprobs(self, logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
        expect("logits", logits, _FLOAT32, None, None)
        expect("token_ids", token_ids, _INT32, len(logits))
        return top_logprobs(self, logits, token_ids, num_best)

    def _downloaded(self, array: Array | None) -> np.ndarray | None:
        return None if array is None else self.download(array)

    def _expect_normed(self, x: Array, residual: Array, norm: Array, weight: Weight) -> None:
        """Raise ValueError unless the arrays fit the product of one normalised row."""
        expect("residual", residual, self.dtype, 1, weight.shape[1])
        expect("norm", norm, self.dtype, weight.shape[1])
        self._expect_operands(x, weight)

    def _expect_operands(self, x: Array | Fp8Rows, weight: Weight) -> int:
        n, k = weight.shape
        if weight.format in w8.FORMATS:
            w8.expect_w8(weight)
        elif weight.format is WeightFormat.DENSE:
            expect("weight", weight.data, self.dtype, n, k)
        elif weight.format is WeightFormat.INT4_TILED:
            int4.expect_int4(weight)
        else:
            known = "dense, fp8, fp8-block, int8, int4-tiled"
            raise ValueError(f"linear: weights in {weight.format} are not supported on a GPU ({known})")
        if not isinstance(x, Fp8Rows):
            expect("x", x, self.dtype, None, k)
            return len(x)
        if weight.format is not WeightFormat.FP8:
            raise ValueError(f"linear: x in e4m3 and weights in {weight.format} do not go together (fp8)")
        expect_fp8("x", x, k)
        return len(x.data)

    def _made_exact(self, batch: AttentionBatch) -> AttentionBatch:
        if not self._is_exact:
            return batch
        if len(batch.context_lens) > MAX_EXACT_ROWS:
            raise ValueError(f"exact_rows: {len(batch.context_lens)} decodes are not supported ({MAX_EXACT_ROWS} rows)")
        return replace(batch, exact=True)

    def _expect_rotation(
        self,
        qkv: Array,
        rotation: HeadRotation,
        positions: Array,
        slots: Array,
        kv: Array,
        layer: int,
        kv_scales: Array | None,
    ) -> None:
        num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        rows, max_len = len(qkv), len(rotation.cos)
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        expect("kv", kv, self.kv_dtype, num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        _expect_scales(kv_scales, self.kv_dtype, num_layers, num_kv_heads)
        expect("qkv", qkv, self.dtype, rows, (num_heads + 2 * num_kv_heads) * head_dim)
        expect("cos", rotation.cos, _FLOAT32, max_len, head_dim // 2)
        expect("sin", rotation.sin, _FLOAT32, max_len, head_dim // 2)
        expect("positions", positions, _INT32, rows)
        expect("slots", slots, _INT64, rows)
        for name, weight in (("q_norm", rotation.q_norm), ("k_norm", rotation.k_norm)):
            if weight is not None:
                expect(name, weight, self.dtype, head_dim)
        if head_dim * self.dtype.itemsize % (2 * _VEC_BYTES) or not 0 <= layer < num_layers:
            raise ValueError(f"rope_kv_write: head_dim {head_dim} in layer {layer} of {num_layers} is not supported")

    def _expect_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        kv, layer, num_sequences = batch.kv, batch.layer, len(batch.context_lens)
        num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        expect("kv", kv, self.kv_dtype, num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        _expect_scales(batch.kv_scales, self.kv_dtype, num_layers, num_kv_heads)
        expect("q", q, self.dtype, None, None, head_dim)
        expect("out", out, self.dtype, *q.shape)
        expect("context_lens", batch.context_lens, _INT32, None)
        expect("block_tables", batch.block_tables, _INT32, num_sequences, None)
        if q.shape[1] % num_kv_heads or not 0 <= layer < num_layers:
            heads = f"{q.shape[1]} query heads and {num_kv_heads} of keys"
            raise ValueError(f"attention: {heads} in layer {layer} of {num_layers} are not supported")


def _expect_scales(kv_scales: Array | None, kv_dtype: np.dtype, num_layers: int, num_kv_heads: int) -> None:
    if (kv_scales is None) == (kv_dtype == _UINT8):
        raise ValueError(f"kv_scales: a cache of {kv_dtype} has {'none' if kv_scales is None else 'some'} (e4m3 only)")
    if kv_scales is not None:
        expect("kv_scales", kv_scales, _FLOAT32, num_layers, 2, num_kv_heads)
