"""Grouped products of few rows with 8-bit weights."""

import numpy as np
import pytest

from model.ops.weight import WeightFormat
from tests.support.expert_checks import (
    REFERENCE,
    product_of_pairs,
    random_stack,
    routed_ids,
    upload_groups,
    upload_stack,
)
from tests.support.fp8_checks import random_rows, upload
from tests.support.kernel_checks import assert_close, normal

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8, 2, 96, 512), (16, 128, 8, 256, 768), (13, 5, 5, 1000, 272), (16, 4, 2, 1, 16)]
"""T, E, k, N, K."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_product(open_ops, rng, dtype, shape, kind, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_ops(dtype)
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_stack(rng, (experts, n, k), kind, ops.dtype)
    x = normal(rng, (rows * used if is_sorted else rows, k), dtype, scale=0.01 if kind is WeightFormat.INT8 else 1)
    with ops.scratch():
        on_device = ops.upload(x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device, is_sorted=is_sorted))
    assert_close(out, product_of_pairs(x, weight, groups, is_sorted=is_sorted).astype(out.dtype), dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_in_e4m3(open_ops, rng, shape, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_ops("bfloat16")
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_stack(rng, (experts, n, k), WeightFormat.FP8, ops.dtype)
    x = random_rows(rng, rows * used if is_sorted else rows, k)
    with ops.scratch():
        on_device = upload(ops, x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device, is_sorted=is_sorted))
    expected = product_of_pairs(x, weight, groups, is_sorted=is_sorted)
    assert np.linalg.norm(out.astype(np.float64) - expected) <= 5e-3 * np.linalg.norm(expected)
