"""Grouped products of few rows of 16 bits."""

import numpy as np
import pytest

from model.ops.experts import gated_experts
from model.ops.weight import Weight, WeightFormat
from tests.support.expert_checks import (
    REFERENCE,
    gated_stacks,
    product_of_pairs,
    random_stack,
    routed_ids,
    upload_groups,
    upload_stack,
)
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal, repeated, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 8, 2, 96, 512),
    (16, 128, 8, 33, 768),
    (13, 5, 5, 1000, 272),
    (16, 4, 2, 1, 8),
    (3, 60, 4, 48, 4144),
]
"""T, E, k, N, K: experts without rows, with more rows than a chunk, and ends of tiles and of K in the middle."""

LAYERS = [(1, 8, 2, 96, 512), (2, 128, 8, 768, 256), (2, 60, 9, 48, 264), (5, 5, 5, 136, 1000), (16, 8, 2, 40, 64)]
"""T, E, k, I, H."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_product(open_ops, rng, dtype, shape, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_ops(dtype)
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_stack(rng, (experts, n, k), WeightFormat.DENSE, NUMPY_DTYPES[dtype])
    x = normal(rng, (rows * used if is_sorted else rows, k), dtype)
    with ops.scratch():
        on_device = ops.upload(x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device, is_sorted=is_sorted))
    assert_close(out, product_of_pairs(x, weight, groups, is_sorted=is_sorted).astype(out.dtype), dtype)


def test_a_row_gives_the_same_bits_with_any_others(open_ops, rng):
    ops, experts, n, k = open_ops("bfloat16"), 6, 80, 512
    ids, x = routed_ids(rng, 16, experts, 2), normal(rng, (16, k), "bfloat16")
    weight = random_stack(rng, (experts, n, k), WeightFormat.DENSE, ops.dtype)
    with ops.scratch():
        stack = upload_stack(ops, weight)
        groups = ops.group_by_expert(ops.upload(ids), experts)
        together = ops.download(ops.experts_linear(ops.upload(x), stack, groups))[ops.download(groups.places)]
        for row in range(16):
            groups = ops.group_by_expert(ops.upload(ids[row : row + 1]), experts)
            alone = ops.download(ops.experts_linear(ops.upload(x[row : row + 1]), stack, groups))
            np.testing.assert_array_equal(alone[ops.download(groups.places)[0]], together[row])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("has_padding", [False, True])
def test_gated_products_have_the_bits_of_one_operation_after_another(open_ops, rng, dtype, shape, has_padding):
    (rows, experts, used, inner, hidden), ops = shape, open_ops(dtype)
    ids = routed_ids(rng, rows, experts, used)
    if has_padding:
        ids[rows // 2 :] = -1
    groups = upload_groups(ops, REFERENCE.group_by_expert(ids, experts))
    stacks = gated_stacks(ops, rng, experts, inner, hidden)
    x, weights = ops.upload(normal(rng, (rows, hidden), dtype)), ops.upload(rng.random((rows, used), np.float32))
    with ops.scratch():
        found = ops.download(ops.gated_experts(x, *stacks, groups, weights))
        expected = ops.download(gated_experts(ops, x, stacks, groups, weights))
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("rows", [1, 16])
def test_speed(open_ops, rng, rows):
    """Gate and up of Qwen3-30B-A3B."""
    ops, experts, used, n, k = open_ops("bfloat16"), 128, 8, 1536, 2048
    ids = routed_ids(rng, rows, experts, used)
    groups = upload_groups(ops, REFERENCE.group_by_expert(ids, experts))
    stack = upload_stack(ops, Weight(repeated(normal(rng, (n, k), "bfloat16", k**-0.5), experts, n, k)))
    x = ops.upload(normal(rng, (rows, k), "bfloat16"))
    seconds = seconds_of(ops, [lambda: ops.experts_linear(x, stack, groups)])
    in_use = len(np.unique(ids))
    report_bandwidth(f"experts_gemv {rows} rows, {in_use} experts of [{n}, {k}]", 2 * in_use * n * k, seconds)
