"""Grouped products of many rows on Hopper."""

import numpy as np
import pytest

from model.ops.weight import Weight, WeightFormat
from tests.support.expert_checks import (
    REFERENCE,
    product_of_pairs,
    random_stack,
    routed_ids,
    upload_groups,
    upload_stack,
)
from tests.support.fp8_checks import random_rows, upload
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal, repeated, report_flops, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [(64, 8, 2, 256, 512), (300, 16, 3, 200, 272), (700, 4, 2, 1000, 768), (1024, 128, 8, 129, 64)]
"""T, E, k, N, K: whole and cut tiles of weights, of rows and of K; experts of very different sizes."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_product(open_hopper_ops, rng, dtype, shape, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_hopper_ops(dtype)
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_stack(rng, (experts, n, k), WeightFormat.DENSE, NUMPY_DTYPES[dtype])
    x = normal(rng, (rows * used if is_sorted else rows, k), dtype)
    with ops.scratch():
        on_device = ops.upload(x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device, is_sorted=is_sorted))
    assert_close(out, product_of_pairs(x, weight, groups, is_sorted=is_sorted).astype(out.dtype), dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_in_e4m3(open_hopper_ops, rng, shape, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_hopper_ops("bfloat16")
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_stack(rng, (experts, n, k), WeightFormat.FP8, ops.dtype)
    x = random_rows(rng, rows * used if is_sorted else rows, k)
    with ops.scratch():
        on_device = upload(ops, x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device, is_sorted=is_sorted))
    expected = product_of_pairs(x, weight, groups, is_sorted=is_sorted)
    assert np.linalg.norm(out.astype(np.float64) - expected) <= 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", [WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8])
@pytest.mark.parametrize("shape", [(300, 4, 2, 200, 272), (900, 8, 2, 256, 512)])
@pytest.mark.parametrize("range_bytes", [1 << 18, 1 << 26])
def test_weights_of_8_bits_are_widened(open_hopper_ops, rng, monkeypatch, kind, shape, range_bytes):
    """One range of experts, and several."""
    monkeypatch.setattr("model.ops.gpu.experts.products.WIDENED_BYTES", range_bytes)
    (rows, experts, used, n, k), ops = shape, open_hopper_ops("bfloat16")
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight, x = random_stack(rng, (experts, n, k), kind, ops.dtype), normal(rng, (rows, k), "bfloat16")
    with ops.scratch():
        on_device = ops.upload(x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device))
    assert_close(out, product_of_pairs(x, weight, groups, is_sorted=False).astype(out.dtype), "bfloat16")


def test_speed(open_hopper_ops, rng):
    """Gate and up of Qwen3-30B-A3B, 8192 tokens."""
    ops, rows, experts, used, n, k = open_hopper_ops("bfloat16"), 8192, 128, 8, 1536, 2048
    groups = upload_groups(ops, REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts))
    stack = upload_stack(ops, Weight(repeated(normal(rng, (n, k), "bfloat16", k**-0.5), experts, n, k)))
    x = ops.upload(repeated(normal(rng, (rows, k), "bfloat16"), rows * used, k))
    seconds = seconds_of(ops, [lambda: ops.experts_linear(x, stack, groups, is_sorted=True)])
    report_flops(f"experts_sm90 {rows} rows of {experts} x [{n}, {k}]", 2 * rows * used * n * k, seconds)
