"""Sums fused with the residual add and norm: NumPy's bits, on every rank and by every path."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.gpu.group.paths import SumPath, fits_push
from tests.support.group_checks import on_ranks, total
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu
EPS = 1e-6


@pytest.mark.parametrize("path", [SumPath.PULL, SumPath.PUSH])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4096, 8, 33, 1000, 8192])
def test_sums_in_rank_order(open_group, rng, dtype, width, path):
    ops, reference = open_group(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    weight = normal(rng, (width,), dtype)
    for rows in (1, 16, 3) if path is SumPath.PUSH else (1, 16, 3, 300):
        if path is SumPath.PUSH and not fits_push(rows, width * ops.dtype.itemsize):
            continue
        hosts, residual = [normal(rng, (rows, width), dtype) for _ in ops.ranks], normal(rng, (rows, width), dtype)
        with ops.scratch():
            own, out = ops.upload(residual), ops.temporary((rows, width), ops.dtype)
            parts, norm = on_ranks(ops, hosts).parts, ops.upload(weight).parts
            ops.sums.sum_add_rms_norm(path, parts, own.parts, norm, EPS, out.parts)
            expected = reference.add_rms_norm(total(hosts), residual, weight, EPS)
            assert ops.download(own).tobytes() == residual.tobytes()
            assert_close(ops.download(out), expected, dtype)


def test_paths_give_the_same_norms(open_group, rng):
    """Bits are equal, so that results do not depend on the batch's size."""
    ops, hosts = open_group("bfloat16"), [normal(rng, (4, 2048), "bfloat16") for _ in range(4)]
    weight, norms = ops.upload(normal(rng, (2048,), "bfloat16")), []
    for path in (SumPath.PUSH, SumPath.PULL, None):
        with ops.scratch():
            parts, residual = on_ranks(ops, hosts[: ops.num_ranks]), ops.upload(hosts[-1])
            if path is None:
                summed = type(parts)(tuple(ops.sums.sum_by(SumPath.TWO_SHOT, parts.parts)))
                norms.append(ops.download(ops.add_rms_norm(summed, residual, weight, EPS)).tobytes())
                continue
            out = ops.temporary((4, 2048), ops.dtype)
            ops.sums.sum_add_rms_norm(path, parts.parts, residual.parts, weight.parts, EPS, out.parts)
            norms.append(ops.download(out).tobytes())
    assert len(set(norms)) == 1


def test_pushed_rows_of_different_widths_and_numbers_do_not_mix(open_group, rng):
    """Slots hold what earlier pushes left."""
    ops = open_group("float16")
    for _ in range(200):
        rows, width = int(rng.integers(1, 17)), 8 * int(rng.integers(1, 512))
        hosts, residual = (
            [normal(rng, (rows, width), "float16") for _ in ops.ranks],
            np.zeros((rows, width), np.float16),
        )
        with ops.scratch():
            own, out = ops.upload(residual), ops.temporary((rows, width), ops.dtype)
            norm = ops.upload(residual[0]).parts
            ops.sums.sum_add_rms_norm(SumPath.PUSH, on_ranks(ops, hosts).parts, own.parts, norm, EPS, out.parts)
            np.testing.assert_array_equal(ops.download(own), total(hosts))
