import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 4096, 5, 100])
@pytest.mark.parametrize("num_ids", [0, 1, 300])
def test_rows_are_exact_and_unknown_ids_give_zeros(open_ops, rng, dtype, width, num_ids):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    table = normal(rng, (37, width), dtype)
    ids = rng.integers(-3, 40, num_ids).astype(np.int32)
    ids[:1] = np.iinfo(np.int32).max
    with ops.scratch():
        rows = ops.download(ops.gather_rows(ops.upload(table), ops.upload(ids)))
    np.testing.assert_array_equal(rows.astype(np.float32), reference.gather_rows(table, ids).astype(np.float32))


@pytest.mark.parametrize("width", [4096, 32003])
def test_logits_are_gathered_too(open_ops, rng, width):
    ops = open_ops("bfloat16")
    table, ids = rng.standard_normal((9, width)).astype(np.float32), np.array([3, 3, 8, 0, 3], np.int32)
    with ops.scratch():
        rows = ops.download(ops.gather_rows(ops.upload(table), ops.upload(ids)))
    np.testing.assert_array_equal(rows, table[ids])


def test_speed(open_ops, rng):
    ops, rows, width = open_ops("bfloat16"), 16384, 4096
    table = ops.empty((128256, width), ops.dtype)
    chosen = [ops.upload(rng.integers(0, len(table), rows).astype(np.int32)) for _ in range(4)]
    seconds = seconds_of(ops, [lambda ids=ids: ops.gather_rows(table, ids) for ids in chosen])
    report_bandwidth("gather_rows [16384, 4096] bf16", 2 * rows * width * 2, seconds)
