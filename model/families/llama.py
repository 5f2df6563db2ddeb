"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3), from token ids to logits.

It speaks only `Ops`, waits for nothing and takes every size from host integers, so a backend can capture it in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.batch import Batch
from model.config import ModelConfig
from model.ops.interface import Array, AttentionBatch, HeadRotation, Ops
from model.ops.weight import Weight


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The weights of one layer; a bias or norm that the config lacks is None."""

    attention_norm: Array  # [H]
    qkv: Weight  # [(Hq + 2 Hkv) * D, H]
    qkv_bias: Array | None
    q_norm: Array | None  # [D]
    k_norm: Array | None  # [D]
    output: Weight  # [H, Hq * D]
    output_bias: Array | None
    mlp_norm: Array  # [H]
    gate_up: Weight  # [2 I, H]
    gate_up_bias: Array | None
    down: Weight  # [H, I]
    down_bias: Array | None


@dataclass(frozen=True, kw_only=True)
class LlamaWeights:
    """All weights of a model. Tied embeddings share one array."""

    embedding: Array  # [V, H]
    layers: tuple[Layer, ...]
    final_norm: Array  # [H]
    lm_head: Weight  # [V, H]
    cos: Array  # float32[max_model_len, D / 2]
    sin: Array  # float32[max_model_len, D / 2]


class Llama:
    """A model of the family, its weights in the memory of `ops`."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: LlamaWeights):
        self.config = config
        self.ops = ops
        self.weights = weights

    def forward(self, batch: Batch, kv: Array, out: Array | None = None) -> Array:
        """Logits float32[R, V] of the rows `batch.logit_rows`; keys and values of all rows are written to `kv`.

        kv [num_blocks, L, 2, Hkv, B, D]. The logits are in `out` where one is given, else they live until the caller's
        scratch ends.
        """
        return self.logits(self.hidden(batch, kv), batch.logit_rows, out)

    def logits(self, hidden: Array, rows: Array | None, out: Array | None = None) -> Array:
        """hidden [T, H], rows int32[R] (None: all) -> logits float32[R, V], in `out` where one is given."""
        if rows is not None:
            hidden = self.ops.gather_rows(hidden, rows)
        return self.ops.linear(hidden, self.weights.lm_head, dtype=np.dtype(np.float32), out=out)

    def hidden(self, batch: Batch, kv: Array) -> Array:
        """What the logits of all rows are made of [T, H]; keys and values are written to `kv`."""
        ops, weights, eps = self.ops, self.weights, self.config.rms_norm_eps
        norms_after = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        plans = self._decode_plans(batch, kv)
        residual = ops.gather_rows(weights.embedding, batch.token_ids)
        hidden = ops.rms_norm(residual, weights.layers[0].attention_norm, eps)
        for index, layer in enumerate(weights.layers):
            with ops.scratch():
                attended = self._attention(index, hidden, batch, kv, plans)
                normed = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
                ops.add_rms_norm(self._mlp(layer, normed), residual, norms_after[index], eps, out=hidden)
        return hidden

    def first_layer(self) -> Llama:
        """One that needs the kernels, products and scratch of all layers, and takes the time of one."""
        return Llama(self.config, self.ops, replace(self.weights, layers=self.weights.layers[:1]))

    def tune(self, num_rows: Sequence[int], num_logit_rows: Sequence[int]) -> None:
        """Find the quickest way for the products of passes over so many rows, and so many of them with logits; see
        `Ops.tune_linear`."""
        ops, layers = self.ops, self.weights.layers
        for name in ("qkv", "output", "gate_up", "down"):
            bias = getattr(layers[0], f"{name}_bias")
            ops.tune_linear([getattr(layer, name) for layer in layers], bias, num_rows)
        ops.tune_linear([self.weights.lm_head], None, num_logit_rows, dtype=np.dtype(np.float32))

    def _decode_plans(self, batch: Batch, kv: Array) -> dict[int, Array | None]:
        """Window -> the plan of its layers' decodes, made once for all of them."""
        n = batch.num_decodes
        if n == 0:
            return {}
        tables, lens = batch.block_tables[:n], batch.context_lens[:n]
        return {
            window: self.ops.plan_decode_attention(
                self.config.num_heads, AttentionBatch(kv, 0, tables, lens, window=window)
            )
            for window in dict.fromkeys(self.config.windows)
        }

    def _attention(self, index: int, x: Array, batch: Batch, kv: Array, plans: Mapping[int, Array | None]) -> Array:
        """x [T, H] -> [T, H]: grouped-query attention of each row to its sequence's cache, its own key included."""
        ops, weights, layer = self.ops, self.weights, self.weights.layers[index]
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        rotation = HeadRotation(weights.cos, weights.sin, layer.q_norm, layer.k_norm, self.config.rms_norm_eps)
        q = ops.rope_kv_write(qkv, rotation, batch.positions, batch.slots, kv, index)
        out = ops.temporary(q.shape, ops.dtype)
        scale, window, n = self.config.head_dim**-0.5, self.config.windows[index], batch.num_decodes
        tables, lens = batch.block_tables, batch.context_lens
        if n > 0:
            decodes = AttentionBatch(kv, index, tables[:n], lens[:n], scale, window, plan=plans[window])
            ops.paged_decode_attention(q[:n], decodes, out[:n])
        if n < batch.num_sequences:
            chunks = AttentionBatch(
                kv, index, tables[n:], lens[n:], scale, window, batch.query_start, batch.max_query_len
            )
            ops.paged_prefill_attention(q, chunks, out)
        return ops.linear(out.reshape(len(out), -1), layer.output, layer.output_bias)

    def _mlp(self, layer: Layer, x: Array) -> Array:
        """x [T, H] -> [T, H]: SwiGLU."""
        ops = self.ops
        gate_up = ops.linear(x, layer.gate_up, layer.gate_up_bias)
        return ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)
