"""What follows a layer's attention, and the next layer's first product, of one row in one launch."""

from dataclasses import replace

import numpy as np
import pytest

from model.ops.experts import layer_tail
from model.ops.interface import LayerTail, Routing
from model.ops.weight import ExpertWeights, Weight
from tests.support.expert_checks import gated_stacks
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu

EPS = 1e-6
SIZES = [
    (128, 8, 768, 2048, 4096, 5120), (97, 31, 40, 512, 640, 1000), (5, 5, 136, 1040, 2056, 72),
    (64, 6, 256, 4096, 4096, 6144),
]  # fmt: skip
"""E, k, I, H, K, N."""


def random_tail(ops, rng, dtype, sizes, has_bias) -> LayerTail:
    experts, _, inner, hidden, attended, width = sizes

    def matrix(rows, columns, scale=1.0):
        return Weight(
            ops.upload((rng.standard_normal((rows, columns)) * scale * columns**-0.5).astype(NUMPY_DTYPES[dtype]))
        )

    # expert weights far apart decide alike
    router = Weight(ops.upload((rng.standard_normal((experts, hidden)) / 4).astype(NUMPY_DTYPES[dtype])))
    return LayerTail(
        output=matrix(hidden, attended),
        output_bias=ops.upload(normal(rng, (hidden,), dtype)) if has_bias else None,
        norm=ops.upload(normal(rng, (hidden,), dtype)),
        experts=ExpertWeights(router, *gated_stacks(ops, rng, experts, inner, hidden)),
        next_norm=ops.upload(normal(rng, (hidden,), dtype)),
        product=matrix(width, hidden),
        product_bias=ops.upload(normal(rng, (width,), dtype)) if has_bias else None,
        width=width,
        eps=EPS,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_row_in_one_launch(open_hopper_ops, rng, dtype, sizes, renormalise):
    ops, (_, used, _, hidden, attended, width) = open_hopper_ops(dtype), sizes
    tail = random_tail(ops, rng, dtype, sizes, renormalise)
    x, residual = normal(rng, (1, attended), dtype), normal(rng, (1, hidden), dtype)
    for slot, has_product in ((63, True), (64, True), (None, True), (3, False), (64, False)):
        routing = Routing(used, renormalise, None if slot is None else ops.upload(np.array([slot])), 64)
        streams = [ops.upload(residual) for _ in range(2)]
        one = tail if has_product else replace(tail, product=None, product_bias=None)
        outs = [
            ops.upload(np.full((1, width if has_product else hidden), np.nan, NUMPY_DTYPES[dtype])) for _ in range(2)
        ]
        assert ops.can_take_tail(one, routing)
        with ops.scratch():
            ops.layer_tail(ops.upload(x), streams[0], one, routing, outs[0])
            layer_tail(ops, ops.upload(x), streams[1], one, routing, outs[1])
        for found, expected in (outs, streams):
            assert_close(ops.download(found), ops.download(expected), dtype)


def test_captured_layers_read_their_own_words(open_hopper_ops, rng):
    """Launches overlap there, and layers exchange rows through one memory."""
    ops, sizes, layers = open_hopper_ops("bfloat16"), (64, 8, 256, 2048, 1024, 1024), 6
    tails = [random_tail(ops, rng, "bfloat16", sizes, False) for _ in range(layers)]
    routing, start = Routing(8, True), ops.upload(normal(rng, (1, 1024), "bfloat16"))
    residual, outs = ops.empty((1, 2048), ops.dtype), [ops.empty((1, 1024), ops.dtype) for _ in range(2)]

    def forward() -> None:
        x = start
        for index, tail in enumerate(tails):
            with ops.scratch():
                ops.layer_tail(x, residual, tail, routing, outs[index % 2])
            x = outs[index % 2]

    def run(work) -> np.ndarray:
        with ops.stream:
            residual[...] = zeros
        work()
        return ops.download(outs[(layers - 1) % 2])

    zeros = ops.upload(np.zeros((1, 2048), ops.dtype))
    with ops.scratch():
        alone = run(forward)
        ops.is_poisoning = False  # a memset between two launches keeps them apart
        try:
            replay = ops.capture(forward)
        finally:
            ops.is_poisoning = True
        for _ in range(20):
            np.testing.assert_array_equal(run(replay).view(np.uint16), alone.view(np.uint16))
    assert np.isfinite(alone.astype(np.float32)).all()
