"""The forward pass of every family: Llama's, with the differences in `model/families/configs`.

It uses only `Ops`, never waits and sizes everything by host integers, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.batch import Batch
from model.config import ModelConfig
from model.families.experts import experts_mlp
from model.ops.interface import Array, AttentionBatch, Fp8Rows, HeadRotation, Ops
from model.ops.weight import ExpertWeights, Weight, WeightFormat


@dataclass(frozen=True)
class LayerRotation:
    """Tables float32[max_model_len, D / 2], shared by layers of one rope."""

    cos: Array
    sin: Array
    query_cos: Array | None = None  # scaled; None: as for k
    query_sin: Array | None = None

    @property
    def nbytes(self) -> int:
        tables = (self.cos, self.sin, self.query_cos, self.query_sin)
        return sum(int(table.nbytes) for table in tables if table is not None)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer. Biases and norms that the config lacks are None."""

    attention_norm: Array  # [H]
    qkv: Weight  # [(Hq + 2 Hkv) * D, H]
    qkv_bias: Array | None
    q_norm: Array | None  # [D], or [Hq * D] if whole
    k_norm: Array | None  # [D], or [Hkv * D] if whole
    rotation: LayerRotation
    output: Weight  # [H, Hq * D]
    output_bias: Array | None
    mlp_norm: Array  # [H]
    gate_up: Weight  # [2 I, H]; of experts [E, 2 I, H]
    gate_up_bias: Array | None
    down: Weight  # [H, I]; of experts [E, H, I]
    down_bias: Array | None
    router: Weight | None = None  # [E, H] if the MLP is one of experts

    @property
    def formats(self) -> tuple[WeightFormat | bool, ...]:
        """Weight formats, shared by layers of one kind."""
        matrices = (self.qkv, self.output, self.gate_up, self.down)
        return (self.router is not None, *(weight.format for weight in matrices))


@dataclass(frozen=True, kw_only=True)
class LlamaWeights:
    """All weights, or a rank's part of them. Tied embeddings share one array."""

    embedding: Array  # [V, H]
    layers: tuple[Layer, ...]
    final_norm: Array  # [H]
    lm_head: Weight  # [V, H]
    kv_scales: Array | None = None  # float32[L, 2, Hkv] of an e4m3 cache
    has_stored_kv_scales: bool = False
    has_rows_of_embedding: bool = False  # lm_head is the rank's rows of `embedding`

    @property
    def num_bytes(self) -> int:
        arrays = [self.embedding, self.final_norm]
        if self.lm_head.data is not self.embedding and not self.has_rows_of_embedding:
            arrays.append(self.lm_head)
        for layer in self.layers:
            arrays += [array for name, array in vars(layer).items() if name != "rotation" and array is not None]
        return self.table_bytes + sum(int(array.nbytes) for array in arrays)

    @property
    def table_bytes(self) -> int:
        """Bytes of all rotation tables."""
        return sum(rotation.nbytes for rotation in {id(each.rotation): each.rotation for each in self.layers}.values())


class Llama:
    def __init__(self, config: ModelConfig, ops: Ops, weights: LlamaWeights):
        self.config = config
        self.ops = ops
        self.weights = weights

    def forward(self, batch: Batch, kv: Array, out: Array | None = None) -> Array:
        """Return logits float32[R, V] of `batch.logit_rows`; write keys and values of all rows to `kv`.

        kv [num_blocks, L, 2, Hkv, B, D]. The logits are in `out` if given, else they live until the caller's scratch
        ends.
        """
        return self.logits(self.hidden(batch, kv), batch.logit_rows, out)

    def logits(self, hidden: Array, rows: Array | None, out: Array | None = None) -> Array:
        """hidden [T, H], rows int32[R] (None: all) -> logits float32[R, V], in `out` if given."""
        if rows is not None:
            hidden = self.ops.gather_rows(hidden, rows)
        head = self.weights.lm_head
        return self.ops.linear(self._input(hidden, head), head, dtype=np.dtype(np.float32), out=out)

    def hidden(self, batch: Batch, kv: Array, state_layers: Sequence[int] = (), states: Array | None = None) -> Array:
        """Return the final norm [T, H], the input of `logits`; write keys and values to `kv`.

        `states` [T, len(state_layers) * H] receives the residual stream that enters each of these layers; the index
        after the last layer means the final norm's input.
        """
        ops, layers, eps = self.ops, self.weights.layers, self.config.residual_eps
        plans = self._decode_plans(batch, kv)
        residual = ops.gather_rows(self.weights.embedding, batch.token_ids)
        if self.config.norm_after:
            return self._hidden_norm_after(residual, batch, kv, plans)
        first_norm = ops.rms_norm_quantised if self._takes_fp8(layers[0].qkv) else ops.rms_norm
        normed = first_norm(residual, layers[0].attention_norm, eps)
        outputs = self._norm_outputs(normed, residual.shape)
        norms_after = [(layer.attention_norm, self._takes_fp8(layer.qkv)) for layer in layers[1:]]
        norms_after.append((self.weights.final_norm, False))
        next_qkv = self._next_qkv(batch)
        qkv = None
        for index, (norm, is_fp8) in enumerate(norms_after):
            if states is not None and index in state_layers:
                ops.place_columns(residual, states, state_layers.index(index) * self.config.hidden_size)
            with ops.scratch():
                if qkv is None:
                    qkv = self._product(index, "qkv", normed, batch)
                attended = self._attention(index, qkv, batch, kv, plans)
                mlp = self._normed_mlp(index, attended, residual, batch, kv)
                if next_qkv is not None and index + 1 < len(layers):
                    after = layers[index + 1]
                    qkv = ops.add_norm_linear(mlp, residual, (norm, eps), after.qkv, after.qkv_bias, next_qkv)
                else:
                    normed, qkv = self._add_norm(mlp, residual, norm, is_fp8, outputs[is_fp8]), None
        if states is not None and len(layers) in state_layers:
            ops.place_columns(residual, states, state_layers.index(len(layers)) * self.config.hidden_size)
        return normed

    def _next_qkv(self, batch: Batch) -> Array | None:
        """Return memory for the qkv [1, N] of a row whose norms are fused with products, else None."""
        layers = self.weights.layers
        if self.ops.num_ranks > 1 or not all(self._is_normed(layer.qkv, batch) for layer in layers):
            return None
        return self.ops.temporary((1, layers[0].qkv.shape[0]), self.ops.dtype)

    def _hidden_norm_after(self, residual: Array, batch: Batch, kv: Array, plans: Mapping[int, Array | None]) -> Array:
        """Return the final norm [T, H]; each `add_rms_norm` overwrites the previous norm."""
        ops, eps, final_norm = self.ops, self.config.residual_eps, self.weights.final_norm
        normed = ops.temporary(residual.shape, ops.dtype)
        for index, layer in enumerate(self.weights.layers):
            with ops.scratch():
                qkv = self._product(index, "qkv", self._input(residual, layer.qkv), batch)
                attended = self._attention(index, qkv, batch, kv, plans)
                ops.add_rms_norm(ops.rms_norm(attended, layer.attention_norm, eps), residual, final_norm, eps, normed)
                mlp = self._mlp(index, self._input(residual, layer.gate_up), batch)
                ops.add_rms_norm(ops.rms_norm(mlp, layer.mlp_norm, eps), residual, final_norm, eps, normed)
        return normed

    def first_layer(self) -> Llama:
        """Return a model of one layer of each kind, or two of the only kind, with the kernels, products and scratch of
        the whole."""
        kinds = {layer.formats: layer for layer in reversed(self.weights.layers)}
        layers = tuple(reversed(kinds.values())) if len(kinds) > 1 else self.weights.layers[:2]
        return Llama(self.config, self.ops, replace(self.weights, layers=layers))

    def tune(self, num_rows: Sequence[int], num_logit_rows: Sequence[int]) -> None:
        """Tune passes over `num_rows` rows and heads of `num_logit_rows`, as in `Ops.tune_linear`."""
        ops, layers = self.ops, self.weights.layers
        dense = [layer for layer in layers if layer.router is None]
        for name in ("qkv", "output", "gate_up", "down"):
            tuned = layers if name in ("qkv", "output") else dense
            if tuned:
                bias = getattr(tuned[0], f"{name}_bias")
                ops.tune_linear([getattr(layer, name) for layer in tuned], bias, num_rows)
        routers = [layer.router for layer in layers if layer.router is not None]
        if routers:
            ops.tune_linear(routers, None, num_rows, dtype=np.dtype(np.float32))
        ops.tune_linear([self.weights.lm_head], None, num_logit_rows, dtype=np.dtype(np.float32))

    def _decode_plans(self, batch: Batch, kv: Array) -> dict[int, Array | None]:
        n = batch.num_decodes
        if n == 0:
            return {}
        tables, lens = batch.block_tables[:n], batch.context_lens[:n]
        return {
            window: self.ops.plan_decode_attention(
                self.config.num_heads,
                AttentionBatch(
                    kv, 0, tables, lens, window=window, kv_scales=self.weights.kv_scales, drafted=batch.is_drafted
                ),
            )
            for window in dict.fromkeys(self.config.windows)
        }

    def _attention(self, index: int, qkv: Array, batch: Batch, kv: Array, plans: Mapping[int, Array | None]) -> Array:
        """qkv [T, (Hq + 2 Hkv) * D] -> [T, H]: grouped-query attention, including each row's own key."""
        layer = self.weights.layers[index]
        attended = self._attended(index, qkv, batch, kv, plans)
        return self._product(index, "output", self._input(attended, layer.output), batch)

    def _attended(self, index: int, qkv: Array, batch: Batch, kv: Array, plans: Mapping[int, Array | None]) -> Array:
        """qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]: attention before the output product."""
        ops, kv_scales, layer = self.ops, self.weights.kv_scales, self.weights.layers[index]
        scale, window, n = self.config.attention_scale, self.config.windows[index], batch.num_decodes
        tables, lens, rounds = batch.block_tables, batch.context_lens, layer.output.quantised_input
        decodes = AttentionBatch(
            kv, index, tables[:n], lens[:n], scale, window, plan=plans.get(window), kv_scales=kv_scales,
            rounds_output=rounds, drafted=batch.is_drafted,
        )  # fmt: skip
        if n == batch.num_tokens and not batch.has_drafts and layer.rotation.query_cos is None:
            return self._decoded(index, qkv, batch, decodes)
        q = self._rotated(index, qkv, batch, kv)
        out = ops.temporary(q.shape, ops.dtype)
        if n > 0:
            ops.paged_decode_attention(q[:n], decodes, out[:n])
        if n < batch.num_sequences:
            rows = batch.query_start, batch.max_query_len
            chunks = AttentionBatch(
                kv, index, tables[n:], lens[n:], scale, window, *rows, kv_scales=kv_scales, rounds_output=rounds
            )
            ops.paged_prefill_attention(q, chunks, out)
        return out.reshape(len(out), -1)

    def _decoded(self, index: int, qkv: Array, batch: Batch, decodes: AttentionBatch) -> Array:
        """qkv [S, (Hq + 2 Hkv) * D], one token per sequence -> attention [S, Hq * D]."""
        ops, layer, eps = self.ops, self.weights.layers[index], self.config.rms_norm_eps
        norms = (layer.q_norm, layer.k_norm)
        if self.config.qk_norm_whole:
            ops.normalise_qk(qkv, *norms, eps)
            norms = (None, None)
        rotation = HeadRotation(layer.rotation.cos, layer.rotation.sin, *norms, eps)
        return ops.rope_decode_attention(qkv, rotation, batch.positions, batch.slots, decodes)

    def _rotated(self, index: int, qkv: Array, batch: Batch, kv: Array) -> Array:
        """qkv [T, (Hq + 2 Hkv) * D] -> q [T, Hq, D], normalised and rotated; keys and values go to `kv`."""
        ops, layer, eps = self.ops, self.weights.layers[index], self.config.rms_norm_eps
        target = (batch.positions, batch.slots, kv, index, self.weights.kv_scales)
        tables, norms = layer.rotation, (layer.q_norm, layer.k_norm)
        if self.config.qk_norm_whole:
            ops.normalise_qk(qkv, *norms, eps)
            norms = (None, None)
        rotation = HeadRotation(tables.cos, tables.sin, *norms, eps)
        if tables.query_cos is None:
            return ops.rope_kv_write(qkv, rotation, *target)
        scaled = HeadRotation(tables.query_cos, tables.query_sin, *norms, eps)
        q = ops.rope_kv_write(qkv, scaled, *target)
        ops.rope_kv_write(qkv, rotation, *target)  # overwrites the scaled keys
        return q

    def _normed_mlp(self, index: int, x: Array, residual: Array, batch: Batch, kv: Array) -> Array:
        """Add x [T, H] to residual; return [T, H], SwiGLU of its norm."""
        ops, layer, eps = self.ops, self.weights.layers[index], self.config.residual_eps
        if layer.router is not None and self.config.experts is not None:
            experts = ExpertWeights(layer.router, layer.gate_up, layer.down)
            slots = batch.slots, kv.shape[0] * kv.shape[4]
            adapters = None if batch.adapters is None else batch.adapters.of_experts(index)
            return experts_mlp(ops, self.config.experts, experts, (x, residual), (layer.mlp_norm, eps), slots, adapters)
        if self._is_normed(layer.gate_up, batch):
            norm = layer.mlp_norm, eps
            if layer.gate_up_bias is None and layer.down_bias is None:
                return ops.add_norm_gated_mlp(x, residual, norm, layer.gate_up, layer.down)
            return self._activated(
                index, ops.add_norm_linear(x, residual, norm, layer.gate_up, layer.gate_up_bias), batch
            )
        return self._mlp(index, self._add_norm(x, residual, layer.mlp_norm, self._takes_fp8(layer.gate_up)), batch)

    def _is_normed(self, weight: Weight, batch: Batch) -> bool:
        """Return whether a product includes the norm before it: one row without adapters, weights of 16 or 4 bits."""
        is_taken = weight.format in (WeightFormat.DENSE, WeightFormat.INT4_TILED)
        return batch.num_tokens == 1 and batch.adapters is None and is_taken

    def _mlp(self, index: int, x: Array | Fp8Rows, batch: Batch) -> Array:
        layer = self.weights.layers[index]
        if batch.adapters is None and layer.gate_up_bias is None and layer.down_bias is None:
            return self.ops.gated_mlp(x, layer.gate_up, layer.down)
        return self._activated(index, self._product(index, "gate_up", x, batch), batch)

    def _activated(self, index: int, gate_up: Array, batch: Batch) -> Array:
        """gate_up [T, 2 I] -> [T, H]: activation and product with down."""
        ops, layer = self.ops, self.weights.layers[index]
        activation = ops.silu_mul_quantised if self._takes_fp8(layer.down) else ops.silu_mul
        return self._product(index, "down", activation(gate_up), batch)

    def _product(self, index: int, name: str, x: Array | Fp8Rows, batch: Batch) -> Array:
        """x [T, K] @ matrix `name` plus bias and adapters -> [T, N]."""
        layer = self.weights.layers[index]
        weight, bias = getattr(layer, name), getattr(layer, f"{name}_bias")
        if batch.adapters is not None:
            return batch.adapters.linear(index, name, x, weight, bias)
        return self.ops.linear(x, weight, bias)

    def _takes_fp8(self, weight: Weight) -> bool:
        return weight.format is WeightFormat.FP8 and weight.quantised_input and self.ops.has_fp8

    def _input(self, x: Array, weight: Weight) -> Array | Fp8Rows:
        return self.ops.quantise_rows(x) if self._takes_fp8(weight) else x

    def _add_norm(
        self, x: Array, residual: Array, norm: Array, is_fp8: bool, out: Array | Fp8Rows | None = None
    ) -> Array | Fp8Rows:
        """Add x to residual; return its norm, in e4m3 if `is_fp8`."""
        add_norm = self.ops.add_rms_norm_quantised if is_fp8 else self.ops.add_rms_norm
        return add_norm(x, residual, norm, self.config.residual_eps, out)

    def _norm_outputs(self, first: Array | Fp8Rows, shape: tuple[int, int]) -> dict[bool, Array | Fp8Rows]:
        """Return norm outputs that outlive a layer's scratch, by whether they are e4m3; `first` is one."""
        ops, is_fp8 = self.ops, isinstance(first, Fp8Rows)
        if is_fp8:
            return {True: first, False: ops.temporary(shape, ops.dtype)}
        if not any(self._takes_fp8(layer.qkv) for layer in self.weights.layers):
            return {False: first}
        data = ops.temporary(shape, np.dtype(np.uint8))
        return {False: first, True: Fp8Rows(data, ops.temporary(shape[:1], np.dtype(np.float32)))}
