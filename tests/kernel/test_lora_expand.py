import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of
from tests.support.lora_cases import PARTS, lora_case

pytestmark = pytest.mark.gpu


def launch(ops, out, shrunk, b, rows, runs, ranks, part_ends: tuple[int, ...], max_run: int) -> None:
    _, width, max_rank = b.shape
    grid = (-(-width // 256), len(runs), -(-max_run // 16))
    ends = [*part_ends[:-1], width, width][:2]
    sizes = map(np.int32, (width, len(part_ends), max_rank, *ends))
    ops.launch("lora_expand", grid, (out, shrunk, b, rows, runs, ranks, *sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [1, 7, 200])
def test_rows_of_mixed_ranks(open_ops, rng, dtype, parts, num_rows):
    """Beyond an adapter's rank `shrunk` holds NaN; rows without an adapter keep their bits."""
    ops, case, reference = open_ops(dtype), lora_case(rng, dtype, parts, num_rows), NumpyOps(NUMPY_DTYPES[dtype])
    shrunk = reference.lora_shrink(case.x, case.matrix, case.rows)
    if not shrunk.size:
        return
    expected = case.out.copy()
    reference.lora_expand(shrunk, case.matrix, case.rows, expected)
    for slot, first, count in case.rows.runs:
        shrunk[first : first + count, :, case.matrix.ranks[slot] :] = np.nan
    out = ops.upload(case.out)
    arrays = (shrunk, case.matrix.b, case.rows.rows, case.rows.runs, case.matrix.ranks)
    launch(ops, out, *map(ops.upload, arrays), case.matrix.part_ends, case.rows.max_run)
    assert_close(ops.download(out), expected, dtype)
    others = np.setdiff1d(np.arange(num_rows), case.rows.rows)
    np.testing.assert_array_equal(ops.download(out)[others], case.out[others])


def test_speed(open_ops, rng):
    """64 rows of 16 adapters of rank 16, Llama-3.1-8B's q, k and v."""
    ops, num_slots, rank, ends = open_ops("bfloat16"), 16, 16, (4096, 5120, 6144)
    b = ops.upload(normal(rng, (num_slots, ends[-1], rank), "bfloat16"))
    out, shrunk = (ops.upload(normal(rng, *how)) for how in (((64, ends[-1]), "bfloat16"), ((64, 3, rank), "float32")))
    rows = ops.upload(np.arange(64, dtype=np.int32))
    runs = ops.upload(np.array([(slot, 4 * slot, 4) for slot in range(num_slots)], np.int32))
    ranks = ops.upload(np.full(num_slots, rank, np.int32))
    seconds = seconds_of(ops, [lambda: launch(ops, out, shrunk, b, rows, runs, ranks, ends, 4)])
    report_bandwidth(f"lora_expand {num_slots} adapters of rank {rank}", b.nbytes + 2 * out.nbytes, seconds)
