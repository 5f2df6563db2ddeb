"""A row's norm, router, experts and sum in one launch, and captured layers of few rows."""

import numpy as np
import pytest

from model.ops.experts import add_norm_experts
from model.ops.interface import Routing
from model.ops.weight import ExpertWeights, Weight
from tests.support.expert_checks import gated_stacks
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu
one_row = pytest.importorskip(
    "model.ops.gpu.experts.one_row", reason="needs the packages of the cuda extra", exc_type=ImportError
)

HIDDEN, EPS = 2048, 1e-6
ROWS = [(128, 8, 768, 2048), (8, 2, 1024, 2048), (97, 31, 40, 512), (5, 5, 136, 1040), (64, 6, 256, 4096)]
"""E, k, I, H."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_row_in_one_launch(open_hopper_ops, rng, dtype, shape, renormalise):
    """Sums of norm and router are added in other orders: expert weights far apart decide alike."""
    (experts, used, inner, hidden), ops = shape, open_hopper_ops(dtype)
    x, residual, norm = (normal(rng, sizes, dtype) for sizes in ((1, hidden), (1, hidden), (hidden,)))
    router = Weight(ops.upload((rng.standard_normal((experts, hidden)) / 4).astype(NUMPY_DTYPES[dtype])))
    weights = ExpertWeights(router, *gated_stacks(ops, rng, experts, inner, hidden))
    for slot, uses in ((63, 1), (64, 1), (None, 3)):
        slots = None if slot is None else ops.upload(np.array([slot]))
        routing = Routing(used, renormalise, slots, 64)
        streams = [ops.upload(residual) for _ in range(2)]
        assert one_row.can_take_row(ops, ops.upload(x), weights, routing)
        for _ in range(uses):
            with ops.scratch():
                args = ops.upload(norm), EPS, weights, routing
                found = ops.download(ops.add_norm_experts(ops.upload(x), streams[0], *args))
                expected = ops.download(add_norm_experts(ops, (ops.upload(x), streams[1]), args[:2], *args[2:]))
            np.testing.assert_array_equal(*(ops.download(stream).view(np.uint16) for stream in streams))
            assert slot != 64 or not found.any()
            assert_close(found, expected, dtype)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_captured_layers_read_their_own_groups(open_ops, rng, rows):
    """Launches overlap there, and layers use one memory for their groups: a read too early takes another layer's."""
    ops, experts, used, inner, layers = open_ops("bfloat16"), 64, 8, 256, 6
    stacks, norm = gated_stacks(ops, rng, experts, inner, HIDDEN), ops.upload(normal(rng, (HIDDEN,), "bfloat16"))
    routers = [Weight(ops.upload(normal(rng, (experts, HIDDEN), "bfloat16", 0.1))) for _ in range(layers)]
    x, routing = normal(rng, (rows, HIDDEN), "bfloat16"), Routing(used, True)
    out, residual = (ops.empty((rows, HIDDEN), ops.dtype) for _ in range(2))

    def forward() -> None:
        normed = ops.add_rms_norm(start, residual, norm, EPS)
        for router in routers:
            with ops.scratch():
                normed = ops.add_norm_experts(normed, residual, norm, EPS, ExpertWeights(router, *stacks), routing)
                ops.add_rms_norm(normed, residual, norm, EPS, out)
                normed = out

    def run(work) -> np.ndarray:
        with ops.stream:
            residual[...] = zeros
        work()
        return ops.download(out)

    start, zeros = ops.upload(x), ops.upload(np.zeros((rows, HIDDEN), ops.dtype))
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
