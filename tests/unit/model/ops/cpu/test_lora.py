"""Shrink and expand are x @ (B @ A).T of each row's own adapter."""

import numpy as np
import pytest

from model.adapter_slots import adapter_rows
from model.ops.adapter_interface import AdapterMatrix
from model.ops.cpu.ops import NumpyOps


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_get_their_own_adapter(dtype):
    rng, ops = np.random.default_rng(0), NumpyOps(np.dtype(dtype))
    num_slots, rank, num_inputs, ends = 3, 8, 24, (6, 10, 20)
    ranks = np.array([8, 0, 3], np.int32)
    a = rng.standard_normal((num_slots, len(ends), rank, num_inputs)).astype(dtype)
    b = rng.standard_normal((num_slots, ends[-1], rank)).astype(dtype)
    matrix = AdapterMatrix(a, b, ranks, ends)
    x, out = (rng.standard_normal((9, width)).astype(dtype) for width in (num_inputs, ends[-1]))
    slots = np.array([2, -1, 0, 1, 0, 2, -1, 0, 1], np.int32)
    wanted = out.astype(np.float64)
    for row, slot in enumerate(slots):
        for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            r = ranks[slot] if slot >= 0 else 0
            change = b[slot, begin:end, :r].astype(np.float64) @ a[slot, part, :r].astype(np.float64)
            wanted[row, begin:end] += change @ x[row].astype(np.float64)
    before, rows = out.copy(), adapter_rows(slots, ops)
    ops.lora_expand(ops.lora_shrink(x, matrix, rows), matrix, rows, out)
    np.testing.assert_allclose(out.astype(np.float64), wanted, atol=1e-4 if dtype == np.float32 else 0.05)
    unchanged = [row for row, slot in enumerate(slots) if slot in (-1, 1)]
    np.testing.assert_array_equal(out[unchanged], before[unchanged])


def test_a_row_has_the_same_bits_in_any_batch():
    rng, ops, ends = np.random.default_rng(0), NumpyOps(), (256, 384)
    a, b, x, out = (
        rng.standard_normal(shape, np.float32) for shape in ((1, 2, 16, 256), (1, 384, 16), (80, 256), (80, 384))
    )
    matrix = AdapterMatrix(a, b, np.array([16], np.int32), ends)

    def added(rows: slice) -> np.ndarray:
        to, grouped = out[rows].copy(), adapter_rows(np.zeros(len(out[rows]), np.int32), ops)
        ops.lora_expand(ops.lora_shrink(x[rows], matrix, grouped), matrix, grouped, to)
        return to

    whole = added(slice(80))
    for rows in (slice(0, 1), slice(7, 8), slice(3, 5), slice(1, 18), slice(10, 74)):
        np.testing.assert_array_equal(added(rows), whole[rows])


@pytest.mark.parametrize("is_sorted", [False, True])
def test_pairs_get_the_adapter_of_their_row_and_expert(is_sorted):
    rng, ops, ends, num_experts = np.random.default_rng(0), NumpyOps(), (6, 12), 3
    ids, slots = np.array([[0, 2], [1, 0], [-1, -1], [2, 1]], np.int32), np.array([1, -1, 0, 0], np.int32)
    groups, ranks = ops.group_by_expert(ids, num_experts), np.repeat(np.array([8, 3], np.int32), num_experts)
    a = rng.standard_normal((6, 2, 8, 24), np.float32)
    b, x = rng.standard_normal((6, 12, 8), np.float32), rng.standard_normal((8 if is_sorted else 4, 24), np.float32)
    out = rng.standard_normal((8, 12), np.float32)
    wanted = out.copy()
    for row, column in np.ndindex(ids.shape):
        pair, slot = groups.places[row, column], slots[row]
        if pair < 0 or slot < 0:
            continue
        adapter, values = slot * num_experts + ids[row, column], x[pair if is_sorted else row]
        for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            r = ranks[adapter]
            wanted[pair, begin:end] += b[adapter, begin:end, :r] @ (a[adapter, part, :r] @ values)
    ops.lora_add(x, AdapterMatrix(a, b, ranks, ends), slots, out, groups, is_sorted=is_sorted)
    np.testing.assert_allclose(out, wanted, atol=1e-4)


def test_rows_of_a_router_are_pairs():
    rng, ops = np.random.default_rng(0), NumpyOps()
    a, b = rng.standard_normal((2, 1, 8, 24), np.float32), rng.standard_normal((2, 5, 8), np.float32)
    x, out, slots = (
        rng.standard_normal((3, 24), np.float32),
        np.zeros((3, 5), np.float32),
        np.array([1, -1, 0], np.int32),
    )
    ops.lora_add(x, AdapterMatrix(a, b, np.array([8, 2], np.int32), (5,)), slots, out)
    np.testing.assert_allclose(out[0], b[1, :, :2] @ (a[1, 0, :2] @ x[0]), atol=1e-4)
    np.testing.assert_allclose(out[2], b[0] @ (a[0, 0] @ x[2]), atol=1e-4)
    assert not out[1].any()
