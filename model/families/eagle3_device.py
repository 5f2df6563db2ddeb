"""An EAGLE-3 head on a device: the algorithm of model/families/eagle3.py on `Ops`, in its dtype.

Keys and values are in the cache's last layer, so they move with copies and swaps of blocks. A step's rows are read
right after it is sampled; each draft then takes the hidden state and the token of the previous one, without the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from model.batch import StateRows
from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3 import Eagle3Tensors, folded_fc, stacked_bias
from model.families.eagle3_config import LAYER, Eagle3Config
from model.ops.interface import Array, AttentionBatch, DraftOps, DraftPlan, HeadRotation, SamplingArrays
from model.ops.weight import Weight
from model.rope import rope_tables
from model.sampler import RECORD

FLOAT32 = np.dtype(np.float32)
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "branch")


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    embedding: Array  # [V, H]
    state_norm: Array | None  # [Eagle3Config.state_norm_width], ones: `fc` contains the norms' weights
    fc: Weight  # [H, k H]
    input_norms: tuple[Array, Array]  # [H], of the embedding and the hidden state
    qkv: Weight  # [(Hq + 2 Hkv) * D, 2 H]
    qkv_bias: Array | None
    output: Weight  # [H, Hq * D]
    output_bias: Array | None
    mlp_norm: Array  # [H]
    gate_up: Weight  # [2 I, H]
    gate_up_bias: Array | None
    down: Weight  # [H, I]
    down_bias: Array | None
    final_norm: Array  # [H]
    lm_head: Weight  # [draft vocabulary, H]
    columns: Array  # int32[V], row of `lm_head` of each token; -1: none
    rotation: HeadRotation
    num_query_rows: int  # Hq * D, the first rows of `qkv`

    @property
    def kv(self) -> Weight:
        """Keys' and values' rows of `qkv`, [2 Hkv * D, 2 H]."""
        return Weight(self.qkv.data[self.num_query_rows :])

    @property
    def kv_bias(self) -> Array | None:
        return None if self.qkv_bias is None else self.qkv_bias[self.num_query_rows :]


class ReadRows(NamedTuple):
    """Hidden states and projections of a step's rows, from which drafts continue."""

    hidden: Array  # [T, H]
    qkv: Array  # [T, (Hq + 2 Hkv) * D], not rotated


@dataclass(frozen=True)
class DraftBatch:
    """K drafts of S sequences."""

    plan: DraftPlan
    tables: Array  # int32[S, W], with the drafts' blocks
    params: SamplingArrays  # at the plan's positions
    hidden: Array  # [S, H], of the last draft
    out: Array  # int32[K, S]


class DeviceEagle3:
    """Head of a model whose cache [num_blocks, L + 1, 2, Hkv, B, D] has a layer for it."""

    def __init__(self, config: Eagle3Config, ops: DraftOps, weights: Eagle3Weights):
        self.config, self.ops, self.weights = config, ops, weights

    def tune(self, num_read: Sequence[int], num_drafted: Sequence[int]) -> None:
        """Tune the products of `read` and `draft_one` for these row counts, as in `Ops.tune_linear`."""
        ops, weights = self.ops, self.weights
        ops.tune_linear([weights.fc], None, num_read)
        ops.tune_linear([weights.qkv], weights.qkv_bias, sorted({*num_read, *num_drafted}))
        ops.tune_linear([weights.kv], weights.kv_bias, num_read)
        ops.tune_linear([weights.output], weights.output_bias, num_drafted)
        ops.tune_linear([weights.gate_up], weights.gate_up_bias, num_drafted)
        ops.tune_linear([weights.down], weights.down_bias, num_drafted)
        ops.tune_linear([weights.lm_head], None, num_drafted, dtype=FLOAT32)

    def read(self, rows: StateRows, next_ids: Array, kv: Array, out: ReadRows | None) -> None:
        """Write keys and values of T rows, which `next_ids` int32[T] follow, and fill `out`; None: no draft follows."""
        ops, weights = self.ops, self.weights
        hidden = ops.linear(self._normed_states(rows.states), weights.fc, out=None if out is None else out.hidden)
        x = self._input(next_ids, hidden)
        if out is None:
            qkv = ops.linear(x, weights.kv, weights.kv_bias)
        else:
            qkv = ops.linear(x, weights.qkv, weights.qkv_bias, out=out.qkv)
        ops.rope_kv_write(qkv, weights.rotation, rows.positions, rows.slots, kv, kv.shape[1] - 1)

    def draft_one(self, number: int, read: ReadRows, batch: DraftBatch, kv: Array) -> None:
        """Draw draft `number` (from 0) of S sequences: the first from `read`, the others from the previous draft."""
        ops, plan, last = self.ops, batch.plan, kv.shape[1] - 1
        with ops.scratch():
            scale, lens = float(self.config.head_dim**-0.5), plan.places[number + 1]
            attention = AttentionBatch(kv, last, batch.tables, lens, scale, self.config.window)
            # Not right before the attention, which reads the plan before its predecessor ends.
            attention = replace(attention, plan=ops.plan_decode_attention(self.config.num_heads, attention))
            if number == 0:
                ops.place_columns(ops.gather_rows(read.hidden, plan.last_rows), batch.hidden, 0)
                qkv = ops.gather_rows(read.qkv, plan.last_rows)
            else:
                x = self._input(batch.out[number - 1], batch.hidden)
                qkv = ops.linear(x, self.weights.qkv, self.weights.qkv_bias)
            at = plan.places[number], plan.slots[number]
            attended = ops.rope_decode_attention(qkv, self.weights.rotation, *at, attention)
            logits = ops.spread_logits(self._finish(batch.hidden, attended), self.weights.columns)
            params = replace(batch.params, position=plan.places[number + 2].view(np.uint32))
            ops.sample(logits, params, out=batch.out[number])

    def _normed_states(self, states: Array) -> Array:
        """states [T, k H] -> [T, k H]."""
        norm = self.weights.state_norm
        if norm is None:
            return states
        return self.ops.rms_norm(states.reshape(-1, len(norm)), norm, self.config.eps).reshape(states.shape)

    def _input(self, next_ids: Array, hidden: Array) -> Array:
        """next_ids int32[T], hidden [T, H] -> [T, 2 H]."""
        weights = self.weights
        return self.ops.draft_input(next_ids, weights.embedding, hidden, weights.input_norms, self.config.eps)

    def _finish(self, hidden: Array, attended: Array) -> Array:
        """Replace hidden [S, H] by the layer's output; return logits float32[S, draft vocabulary]."""
        ops, weights, eps = self.ops, self.weights, self.config.eps
        residual = hidden
        if self.config.norm_before_residual:
            residual = ops.rms_norm(hidden, weights.input_norms[1], eps)
        attention = ops.linear(attended, weights.output, weights.output_bias)
        norm = weights.mlp_norm, eps
        gate_up = ops.add_norm_linear(attention, residual, norm, weights.gate_up, weights.gate_up_bias)
        mlp = ops.linear(ops.silu_mul(gate_up), weights.down, weights.down_bias)
        normed = ops.add_rms_norm(mlp, residual, weights.final_norm, eps)
        output = normed if self.config.norm_output else residual
        if output is not hidden:
            ops.place_columns(output, hidden, 0)
        return ops.linear(normed, weights.lm_head, dtype=FLOAT32)


def sampling_columns(records: bytes, count: int) -> list[np.ndarray]:
    """Return the columns of `sampling_of` for joined RECORDs, padded to `count` with greedy rows."""
    padded = np.zeros(count, RECORD)
    known = np.frombuffer(records, RECORD)
    padded[: len(known)] = known
    return [np.ascontiguousarray(padded[name]) for name in COLUMNS]


def sampling_of(columns: Sequence[Array], plan: DraftPlan) -> SamplingArrays:
    """Return the sampling parameters of S tokens, without penalties, biases and masks."""
    own = dict(zip(COLUMNS, columns, strict=True))
    return SamplingArrays(
        **own,
        position=plan.places[0].view(np.uint32),
        penalties=None,
        bias=None,
        num_logprobs=0,
        with_logprobs=False,
    )


def check_on_device(config: Eagle3Config, target: ModelConfig) -> None:
    """Raise ModelError if the head's keys do not fit a layer of the model's cache."""
    own, models = (config.num_kv_heads, config.head_dim), (target.num_kv_heads, target.head_dim)
    if own != models:
        raise ModelError(
            f"a head with {own[0]} KV heads of {own[1]} is not supported on a GPU (the model's: {models[0]} of "
            f"{models[1]})"
        )


def upload_eagle3(tensors: Eagle3Tensors, ops: DraftOps, embedding: Array, max_model_len: int) -> DeviceEagle3:
    """Upload a head; `embedding` [V, H] is the model's, used unless the head has one."""
    config, stored = tensors.config, tensors.weights
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."

    def upload(*names: str) -> Array:
        parts = [stored[f"{name}.weight"].astype(ops.dtype, copy=False) for name in names]
        return ops.upload(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def upload_bias(*modules: str) -> Array | None:
        bias = stacked_bias(stored, *modules)
        return None if bias is None else ops.upload(bias.astype(ops.dtype))

    columns = np.full(len(embedding), -1, np.int32)
    columns[tensors.token_ids] = np.arange(len(tensors.token_ids))
    q_norm, k_norm = (upload(f"{attention}{name}_norm") if config.has_qk_norms else None for name in "qk")
    cos, sin = map(ops.upload, rope_tables(config.rope, config.head_dim, max_model_len))
    state_norm = ops.upload(np.ones(config.state_norm_width, ops.dtype)) if config.state_norms else None
    weights = Eagle3Weights(
        embedding=embedding
        if tensors.embedding is None
        else ops.upload(tensors.embedding.astype(ops.dtype, copy=False)),
        state_norm=state_norm,
        fc=Weight(ops.upload(folded_fc(config, stored).astype(ops.dtype))),
        input_norms=(upload(f"{LAYER}input_layernorm"), upload(f"{LAYER}hidden_norm")),
        qkv=Weight(upload(*(f"{attention}{name}_proj" for name in "qkv"))),
        qkv_bias=upload_bias(*(f"self_attn.{name}_proj" for name in "qkv")),
        output=Weight(upload(f"{attention}o_proj")),
        output_bias=upload_bias("self_attn.o_proj"),
        mlp_norm=upload(f"{LAYER}post_attention_layernorm"),
        gate_up=Weight(upload(f"{mlp}gate_proj", f"{mlp}up_proj")),
        gate_up_bias=upload_bias("mlp.gate_proj", "mlp.up_proj"),
        down=Weight(upload(f"{mlp}down_proj")),
        down_bias=upload_bias("mlp.down_proj"),
        final_norm=upload("norm"),
        lm_head=Weight(upload("lm_head")),
        columns=ops.upload(columns),
        rotation=HeadRotation(cos, sin, q_norm, k_norm, config.eps),
        num_query_rows=config.num_heads * config.head_dim,
    )
    return DeviceEagle3(config, ops, weights)
