"""Tensor parallelism: operations of a model whose matrices are divided among the ranks of a group.

A product with a matrix divided by rows gives each rank its own outputs. One divided by columns gives `PartialSums`,
which the next norm sums. Each rank samples from its part of the vocabulary, and the best token is taken; thresholds,
masks and log-probabilities need gathered logits. All else is done on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from model.ops.attention import rope_decode_attention
from model.ops.collectives import Collectives
from model.ops.experts import add_norm_experts, gated_experts
from model.ops.group.arrays import GroupArray, PartialSums, SplitArray, divided, joined, on_rank, product_split
from model.ops.group.device import GroupDevice
from model.ops.interface import (
    Array,
    AttentionBatch,
    ExpertGroups,
    Fp8Rows,
    HeadRotation,
    PartOps,
    Routing,
    Sampled,
    SamplingArrays,
)
from model.ops.mlp import add_norm_gated_mlp, gated_mlp
from model.ops.norm import add_norm_linear
from model.ops.weight import ExpertWeights, Weight


class GroupOps(GroupDevice):
    """`Ops` on n ranks, run in lockstep by one thread."""

    def __init__(self, ranks: Sequence[PartOps], collectives: Collectives):
        super().__init__(ranks)
        self._collectives = collectives
        self.dtype, self.kv_dtype = ranks[0].dtype, ranks[0].kv_dtype
        self.weight_formats, self.has_fp8 = ranks[0].weight_formats, ranks[0].has_fp8

    def find_nonfinite(self, x: Array, found: Array) -> None:
        self._each(lambda ops, x, found: ops.find_nonfinite(x, found), x, found)

    def gather_rows(self, table: Array, ids: Array) -> Array:
        rows = self._each(lambda ops, table, ids: ops.gather_rows(table, ids), table, ids)
        return replace(table, parts=rows.parts)

    def place_columns(self, x: Array, out: Array, first: int) -> None:
        self._each(lambda ops, x, out: ops.place_columns(x, out, first), x, out)

    def pick_tokens(self, token_ids: Array, previous: Array, source: Array) -> None:
        self._each(lambda ops, *arrays: ops.pick_tokens(*arrays), token_ids, previous, source)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self._each(lambda ops, x, weight: ops.rms_norm(x, weight, eps), self._summed(x), weight)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        """Add x, or the sum of its `PartialSums`, which is rounded first, as one rank's product is."""
        arrays = self._summed(x), residual, weight, eps, out
        return self._each(lambda ops, *arrays: ops.add_rms_norm(*arrays), *arrays)

    def linear(
        self,
        x: Array | Fp8Rows,
        weight: Weight,
        bias: Array | None = None,
        *,
        dtype: np.dtype | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return `PartialSums` for a matrix divided by columns, whose bias rank 0 adds; else each rank's outputs.

        Ranks rescale their own products, because scales of quantised inputs may differ.
        """
        x = self._inputs(x, weight)
        is_partial = _is_by_columns(weight)
        parts = [
            ops.linear(
                *on_rank((x, weight, None if is_partial and rank else bias), rank), dtype=dtype, out=on_rank(out, rank)
            )
            for rank, ops in self._turns()
        ]
        if is_partial:
            return PartialSums(tuple(parts))
        return divided(GroupArray(tuple(parts)), product_split(weight.data))

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
        prepared: Weight = self._each(lambda ops, weight: ops.prepare_weight(weight), weight)
        return replace(prepared, data=replace(weight.data, parts=prepared.data.parts))

    def tune_linear(
        self, weights: Sequence[Weight], bias: Array | None, num_rows: Sequence[int], *, dtype: np.dtype | None = None
    ) -> None:
        self._each(lambda ops, own, bias: ops.tune_linear(own, bias, num_rows, dtype=dtype), list(weights), bias)

    def linear_sizes(self, most: int) -> list[int]:
        return self.ranks[0].linear_sizes(most)

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
        arrays = qkv, rotation, positions, slots, kv, layer, kv_scales
        return self._each(lambda ops, *arrays: ops.rope_kv_write(*arrays), *arrays)

    def normalise_qk(self, qkv: Array, q_norm: Array, k_norm: Array, eps: float) -> None:
        """Gather q and k, whose norms are over the heads of all ranks; the norms' weights are whole."""
        num_columns = qkv.shape[1]
        q_size = len(q_norm) // self.num_ranks
        k_size = (num_columns - q_size) // 2
        for begin, size, norm in ((0, q_size, q_norm), (q_size, k_size, k_norm)):
            copies = self.num_ranks * size // len(norm)
            own = [part[:, begin : begin + size] for part in qkv.parts]
            whole = self._collectives.gather(own, copies=copies)
            for rank, ops in self._turns():
                start = rank // copies * size
                own[rank][...] = ops.rms_norm(whole[rank], norm.parts[rank], eps)[:, start : start + size]

    def exact_rows(self) -> AbstractContextManager[None]:
        return self._exact_rows()

    @contextmanager
    def _exact_rows(self) -> Iterator[None]:
        with ExitStack() as of_ranks:
            for ops in self.ranks:
                of_ranks.enter_context(ops.exact_rows())
            yield

    def plan_decode_attention(self, num_heads: int, batch: AttentionBatch) -> Array | None:
        own_heads = num_heads // self.num_ranks
        plan: Array | None = self._each(lambda ops, batch: ops.plan_decode_attention(own_heads, batch), batch)
        return plan

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
        self._each(lambda ops, *arrays: ops.paged_decode_attention(*arrays), q, batch, out)

    def paged_prefill_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        self._each(lambda ops, *arrays: ops.paged_prefill_attention(*arrays), q, batch, out)

    def silu_mul(self, gate_up: Array) -> Array:
        return self._each(lambda ops, x: ops.silu_mul(x), gate_up)

    def quantise_rows(self, x: Array, out: Fp8Rows | None = None) -> Fp8Rows:
        rows: Fp8Rows = self._each(lambda ops, x, out: ops.quantise_rows(x, out), x, out)
        return rows

    def dequantise_rows(self, x: Fp8Rows) -> Array:
        return self._each(lambda ops, x: ops.dequantise_rows(x), x)

    def rms_norm_quantised(self, x: Array, weight: Array, eps: float) -> Fp8Rows:
        rows: Fp8Rows = self._each(
            lambda ops, x, weight: ops.rms_norm_quantised(x, weight, eps), self._summed(x), weight
        )
        return rows

    def add_rms_norm_quantised(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Fp8Rows | None = None
    ) -> Fp8Rows:
        arrays = self._summed(x), residual, weight, eps, out
        rows: Fp8Rows = self._each(lambda ops, *arrays: ops.add_rms_norm_quantised(*arrays), *arrays)
        return rows

    def silu_mul_quantised(self, gate_up: Array) -> Fp8Rows:
        rows: Fp8Rows = self._each(lambda ops, x: ops.silu_mul_quantised(x), gate_up)
        return rows

    def gated_mlp(self, x: Array | Fp8Rows, gate_up: Weight, down: Weight) -> Array:
        return gated_mlp(self, x, gate_up, down)

    def add_norm_gated_mlp(
        self, x: Array, residual: Array, norm: tuple[Array, float], gate_up: Weight, down: Weight
    ) -> Array:
        return add_norm_gated_mlp(self, (x, residual), norm, gate_up, down)

    def route_experts(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, Array]:
        routes: tuple[Array, Array] = self._each(
            lambda ops, own, slots: ops.route_experts(own, num_used, renormalise, slots, num_slots), logits, slots
        )
        return routes

    def group_by_expert(self, ids: Array, num_experts: int) -> ExpertGroups:
        groups: ExpertGroups = self._each(lambda ops, own: ops.group_by_expert(own, num_experts), ids)
        return groups

    def route_to_groups(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, ExpertGroups]:
        found: tuple[Array, ExpertGroups] = self._each(
            lambda ops, own, slots: ops.route_to_groups(own, num_used, renormalise, slots, num_slots), logits, slots
        )
        return found

    def experts_linear(
        self, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, *, is_sorted: bool = False
    ) -> Array:
        """Return `PartialSums` for matrices divided by columns, like `linear`."""
        arrays = self._inputs(x, weight), weight, groups
        product = self._each(lambda ops, *own: ops.experts_linear(*own, is_sorted=is_sorted), *arrays)
        return PartialSums(product.parts) if _is_by_columns(weight) else product

    def combine_experts(self, x: Array, groups: ExpertGroups, weights: Array) -> Array:
        """Combine the rows; `PartialSums` give `PartialSums`."""
        own = GroupArray(x.parts)
        rows = self._each(lambda ops, *arrays: ops.combine_experts(*arrays), own, groups, weights)
        return replace(x, parts=rows.parts)

    def add_norm_experts(
        self, x: Array, residual: Array, weight: Array, eps: float, experts: ExpertWeights, routing: Routing
    ) -> Array:
        return add_norm_experts(self, (x, residual), (weight, eps), experts, routing)

    def gated_experts(self, x: Array, gate_up: Weight, down: Weight, groups: ExpertGroups, weights: Array) -> Array:
        """Return `PartialSums` for stacks divided by columns."""
        if down.input_order is not None:  # its inputs are gathered
            return gated_experts(self, x, (gate_up, down), groups, weights)
        arrays = x, gate_up, down, groups, weights
        out = self._each(lambda ops, *own: ops.gated_experts(*own), *arrays)
        return PartialSums(out.parts) if _is_by_columns(down) else out

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        self._each(lambda ops, *arrays: ops.copy_blocks(*arrays), kv, sources, targets)

    def top_logprobs(self, logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
        arrays = self._gathered(logits), token_ids
        best: tuple[Array, Array, Array] = self._each(lambda ops, *own: ops.top_logprobs(*own, num_best), *arrays)
        return best

    def sample(self, logits: Array, params: SamplingArrays, out: Array | None = None) -> Sampled:
        """Sample from each rank's part and compare the best tokens; gather the logits if that is not enough."""
        needs_all = params.has_thresholds or params.with_logprobs or params.adjusts_logprobs or params.mask is not None
        if isinstance(logits, SplitArray) and not needs_all:
            return self._best_of_parts(logits, params, out)
        arrays = self._gathered(logits), params, out
        sampled: Sampled = self._each(lambda ops, *arrays: ops.sample(*arrays), *arrays)
        return sampled

    def _best_of_parts(self, logits: SplitArray, params: SamplingArrays, out: Array | None) -> Sampled:
        candidates = []
        for rank, ops in self._turns():
            [(_, first, stop)] = logits.split.ranges(rank, self.num_ranks)
            part = logits.parts[rank][:, : stop - first]
            candidates.append(ops.sample_part(part, on_rank(params, rank), first))
        outs = [on_rank(out, rank) for rank in range(self.num_ranks)]
        sampled: Sampled = joined(self._collectives.best(candidates, outs))
        return sampled

    def _summed(self, x: Array) -> Array:
        return GroupArray(tuple(self._collectives.sum(x.parts))) if isinstance(x, PartialSums) else x

    def _inputs(self, x: Array | Fp8Rows, weight: Weight) -> Array | Fp8Rows:
        """Return the ranks' inputs x [T, K] side by side if the weight's `input_order` selects among all of them."""
        if isinstance(x, GroupArray) and _is_by_columns(weight) and weight.input_order is not None:
            return GroupArray(tuple(self._collectives.gather(x.parts)))
        return x

    def _gathered(self, logits: Array) -> Array:
        if not isinstance(logits, SplitArray):
            return logits
        return GroupArray(tuple(self._collectives.gather(logits.parts, width=logits.split.size)))


def _is_by_columns(weight: Weight) -> bool:
    return isinstance(weight.data, SplitArray) and weight.data.split.axis == 1
