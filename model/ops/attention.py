"""Decode attention, operation by operation."""

from __future__ import annotations

from model.ops.interface import Array, AttentionBatch, HeadRotation, Ops


def rope_decode_attention(
    ops: Ops, qkv: Array, rotation: HeadRotation, at: tuple[Array, Array], batch: AttentionBatch
) -> Array:
    """Implement `Ops.rope_decode_attention`; `at` is (positions, slots)."""
    q = ops.rope_kv_write(qkv, rotation, *at, batch.kv, batch.layer, batch.kv_scales)
    out = ops.temporary(q.shape, ops.dtype)
    ops.paged_decode_attention(q, batch, out)
    return out.reshape(len(out), -1)
