"""Grouped products of many rows with 4-bit weights on Hopper."""

import numpy as np
import pytest

from tests.support.expert_checks import (
    REFERENCE,
    product_of_pairs,
    random_int4_stack,
    routed_ids,
    upload_groups,
    upload_stack,
)
from tests.support.kernel_checks import assert_close, normal, repeated, report_flops, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [(64, 8, 2, 256, 512), (300, 16, 3, 208, 256), (700, 4, 2, 1008, 768), (1024, 128, 8, 144, 128)]
"""T, E, k, N, K: whole and cut tiles of weights and of rows, one span; experts of very different sizes."""

LAYOUTS = [(32, True, "float16"), (64, False, "bfloat16"), (128, True, "bfloat16"), (256, False, "float16")]
"""Group size, zero points, dtype of scales."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_product(open_hopper_ops, rng, dtype, layout, shape, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_hopper_ops(dtype)
    if k % layout[0]:
        pytest.skip("no whole groups")
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_int4_stack(rng, (experts, n, k), *layout)
    x = normal(rng, (rows * used if is_sorted else rows, k), dtype)
    with ops.scratch():
        on_device = ops.upload(x), upload_stack(ops, weight), upload_groups(ops, groups)
        out = ops.download(ops.experts_linear(*on_device, is_sorted=is_sorted))
    assert_close(out, product_of_pairs(x, weight, groups, is_sorted=is_sorted).astype(out.dtype), dtype)


def test_pairs_of_padding_are_not_computed(open_hopper_ops, rng):
    ops, ids = open_hopper_ops("bfloat16"), routed_ids(rng, 300, 8, 2)
    ids[100:] = -1
    groups, weight = REFERENCE.group_by_expert(ids, 8), random_int4_stack(rng, (8, 256, 512), 128, False, "bfloat16")
    x = normal(rng, (300, 512), "bfloat16")
    with ops.scratch():
        out = ops.download(ops.experts_linear(ops.upload(x), upload_stack(ops, weight), upload_groups(ops, groups)))
    assert_close(out[:200], product_of_pairs(x, weight, groups, is_sorted=False)[:200].astype(out.dtype), "bfloat16")
    assert np.isnan(out[200:].astype(np.float32)).all()  # as poisoned


def test_speed(open_hopper_ops, rng):
    """Gate and up of Qwen3-30B-A3B, 8192 tokens."""
    ops, rows, experts, used, n, k = open_hopper_ops("bfloat16"), 8192, 128, 8, 1536, 2048
    groups = upload_groups(ops, REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts))
    stack = upload_stack(ops, random_int4_stack(rng, (experts, n, k), 128, False, "bfloat16"))
    x = ops.upload(repeated(normal(rng, (rows, k), "bfloat16"), rows * used, k))
    seconds = seconds_of(ops, [lambda: ops.experts_linear(x, stack, groups, is_sorted=True)])
    report_flops(f"experts_w4a16_sm90 {rows} rows of {experts} x [{n}, {k}]", 2 * rows * used * n * k, seconds)
