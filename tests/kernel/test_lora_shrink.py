import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of
from tests.support.lora_cases import PARTS, lora_case

pytestmark = pytest.mark.gpu


def launch(ops, shrunk, x, a, rows, runs, ranks, max_run: int) -> None:
    _, num_parts, max_rank, num_inputs = a.shape
    grid = (-(-num_parts * max_rank // 8), len(runs), -(-max_run // 16))
    sizes = map(np.int32, (num_inputs, num_parts, max_rank))
    ops.launch("lora_shrink", grid, (shrunk, x, a, rows, runs, ranks, *sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [1, 7, 200])
def test_rows_of_mixed_ranks(open_ops, rng, dtype, parts, num_rows):
    ops, case = open_ops(dtype), lora_case(rng, dtype, parts, num_rows)
    expected = NumpyOps(NUMPY_DTYPES[dtype]).lora_shrink(case.x, case.matrix, case.rows)
    if not expected.size:
        return
    shrunk = ops.upload(np.zeros_like(expected))
    arrays = (case.x, case.matrix.a, case.rows.rows, case.rows.runs, case.matrix.ranks)
    launch(ops, shrunk, *map(ops.upload, arrays), case.rows.max_run)
    assert_close(ops.download(shrunk), expected, "float32")


def test_speed(open_ops, rng):
    """64 rows of 16 adapters of rank 16, Llama-3.1-8B's q, k and v."""
    ops, num_slots, rank, num_inputs = open_ops("bfloat16"), 16, 16, 4096
    a = ops.upload(normal(rng, (num_slots, 3, rank, num_inputs), "bfloat16"))
    x = ops.upload(normal(rng, (64, num_inputs), "bfloat16"))
    rows = ops.upload(np.arange(64, dtype=np.int32))
    runs = ops.upload(np.array([(slot, 4 * slot, 4) for slot in range(num_slots)], np.int32))
    ranks, shrunk = ops.upload(np.full(num_slots, rank, np.int32)), ops.empty((64, 3, rank), np.dtype(np.float32))
    seconds = seconds_of(ops, [lambda: launch(ops, shrunk, x, a, rows, runs, ranks, 4)])
    report_bandwidth(f"lora_shrink {num_slots} adapters of rank {rank}", a.nbytes + x.nbytes, seconds)
