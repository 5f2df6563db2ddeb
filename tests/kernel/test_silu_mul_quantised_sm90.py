"""The kernel whose blocks share a row, against `silu_mul` and `quantise_rows`, which do not: equal in every bit."""

import numpy as np
import pytest

from tests.support.fp8_checks import assert_same_rows, download
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.gpu


@pytest.fixture
def launch(open_hopper_ops, monkeypatch):
    """Names of launched kernels."""
    ops, names = open_hopper_ops("bfloat16"), []
    real = ops.launch
    monkeypatch.setattr(ops, "launch", lambda name, *args, **how: (names.append(name), real(name, *args, **how)))
    return ops, names


@pytest.mark.parametrize("width", [8192, 14336, 40000, 65536])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_bits_match_the_two_separate_kernels(launch, rng, rows, width):
    ops, names = launch
    gate_up = normal(rng, (rows, 2 * width), "bfloat16", scale=4.0)
    gate_up[0, :width] *= 1000
    gate_up[-1, width // 2] = np.nan if rows > 1 else 0
    on_device = ops.upload(gate_up)
    with ops.scratch():
        fused = download(ops, ops.silu_mul_quantised(on_device))
        assert names == ["silu_mul_quantised_sm90"]
        apart = download(ops, ops.quantise_rows(ops.silu_mul(on_device)))
    assert_same_rows(fused, apart)


@pytest.mark.parametrize(("rows", "width"), [(9, 14336), (1, 4096), (1, 14340)])
def test_more_or_narrower_rows_take_a_block_each(launch, rng, rows, width):
    ops, names = launch
    with ops.scratch():
        ops.silu_mul_quantised(ops.upload(normal(rng, (rows, 2 * width), "bfloat16")))
    assert names == ["silu_mul_quantised"]
