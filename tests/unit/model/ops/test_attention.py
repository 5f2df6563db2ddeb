"""Rotation, cache write and attention of decodes as one operation."""

from __future__ import annotations

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import AttentionBatch, HeadRotation

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8


def test_a_sequence_attends_to_its_new_token():
    rng, ops, layer = np.random.default_rng(0), NumpyOps(), 1
    lens = np.array([1, 0, 19], np.int32)
    tables = rng.permutation(12).reshape(3, 4).astype(np.int32)
    kv = rng.standard_normal((12, 2, 2, KV_HEADS, BLOCK, DIM), np.float32)
    qkv = rng.standard_normal((3, (HEADS + 2 * KV_HEADS) * DIM), np.float32)
    angles = rng.uniform(0, 6, (32, DIM // 2)).astype(np.float32)
    rotation = HeadRotation(np.cos(angles), np.sin(angles))
    positions = np.maximum(lens - 1, 0)
    slots = tables[np.arange(3), positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    slots[lens == 0] = len(kv) * BLOCK
    before = kv.copy()
    out = ops.rope_decode_attention(qkv, rotation, positions, slots, AttentionBatch(kv, layer, tables, lens, 0.25))
    value = qkv[0].reshape(-1, DIM)[-KV_HEADS:]  # all that the first sequence sees
    np.testing.assert_allclose(out[0], np.repeat(value, HEADS // KV_HEADS, axis=0).ravel(), rtol=1e-6)
    np.testing.assert_array_equal(kv[tables[0, 0], layer, 1, :, 0], value)
    assert not out[1].any()
    written = (kv != before).any(axis=(1, 2, 3, 5))
    assert sorted(zip(*np.nonzero(written), strict=True)) == sorted(
        (slot // BLOCK, slot % BLOCK) for slot in slots[[0, 2]]
    )
