"""Grouped products of few rows with 4-bit weights."""

import numpy as np
import pytest

from model.ops.weight import WeightFormat
from tests.support.expert_checks import (
    REFERENCE,
    product_of_pairs,
    random_int4_stack,
    routed_ids,
    upload_groups,
    upload_stack,
)
from tests.support.kernel_checks import assert_close, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8, 2, 96, 512), (16, 128, 8, 48, 768), (13, 5, 5, 1008, 256), (16, 4, 2, 16, 128), (3, 60, 4, 48, 4224)]
"""T, E, k, N, K: experts without rows, with more rows than a chunk, and fewer spans of K than warps."""

LAYOUTS = [(32, True, "float16"), (64, False, "bfloat16"), (128, True, "bfloat16"), (256, False, "float16")]
"""Group size, zero points, dtype of scales."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_product(open_ops, rng, dtype, layout, shape, is_sorted):
    (rows, experts, used, n, k), ops = shape, open_ops(dtype)
    if k % layout[0]:
        pytest.skip("no whole groups")
    groups = REFERENCE.group_by_expert(routed_ids(rng, rows, experts, used), experts)
    weight = random_int4_stack(rng, (experts, n, k), *layout)
    x = normal(rng, (rows * used if is_sorted else rows, k), dtype)
    with ops.scratch():
        stack = upload_stack(ops, weight)
        assert stack.format is WeightFormat.INT4_TILED
        out = ops.download(ops.experts_linear(ops.upload(x), stack, upload_groups(ops, groups), is_sorted=is_sorted))
    assert_close(out, product_of_pairs(x, weight, groups, is_sorted=is_sorted).astype(out.dtype), dtype)


def test_a_row_gives_the_same_bits_with_any_others(open_ops, rng):
    ops, experts = open_ops("bfloat16"), 6
    ids, x = routed_ids(rng, 16, experts, 2), normal(rng, (16, 512), "bfloat16")
    weight = random_int4_stack(rng, (experts, 80, 512), 128, True, "bfloat16")
    with ops.scratch():
        stack = upload_stack(ops, weight)
        groups = ops.group_by_expert(ops.upload(ids), experts)
        together = ops.download(ops.experts_linear(ops.upload(x), stack, groups))[ops.download(groups.places)]
        for row in range(16):
            groups = ops.group_by_expert(ops.upload(ids[row : row + 1]), experts)
            alone = ops.download(ops.experts_linear(ops.upload(x[row : row + 1]), stack, groups))
            np.testing.assert_array_equal(alone[ops.download(groups.places)[0]], together[row])


@pytest.mark.parametrize("rows", [1, 16])
def test_speed(open_ops, rng, rows):
    """Gate and up of Qwen3-30B-A3B."""
    ops, experts, used, n, k = open_ops("bfloat16"), 128, 8, 1536, 2048
    ids = routed_ids(rng, rows, experts, used)
    groups = upload_groups(ops, REFERENCE.group_by_expert(ids, experts))
    stack = upload_stack(ops, random_int4_stack(rng, (experts, n, k), 128, False, "bfloat16"))
    x = ops.upload(normal(rng, (rows, k), "bfloat16"))
    seconds = seconds_of(ops, [lambda: ops.experts_linear(x, stack, groups)])
    in_use = len(np.unique(ids))
    num_bytes = in_use * stack.nbytes // experts
    report_bandwidth(f"experts_gemv_w4a16 {rows} rows, {in_use} experts of [{n}, {k}]", num_bytes, seconds)
