import numpy as np
import pytest

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of
from tests.support.lora_cases import PARTS, lora_case

pytestmark = pytest.mark.gpu


def check(ops, case, dtype: str, tile_rows: int) -> None:
    expected = case.known(NumpyOps(NUMPY_DTYPES[dtype]).lora_shrink(case.x, case.matrix, case.rows))
    if not expected.size:
        return
    with ops.scratch():
        shrunk = ops.download(ops.lora_shrink(ops.upload(case.x), *case.on(ops, tile_rows)))
    assert_close(case.known(shrunk), expected, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 64, 200, 512])
def test_rows_of_mixed_ranks(open_ops, rng, dtype, parts, num_rows):
    check(open_ops(dtype), lora_case(rng, dtype, parts, num_rows), dtype, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [5, 33, 2100])
def test_large_tiles(open_ops, rng, dtype, num_rows):
    check(open_ops(dtype), lora_case(rng, dtype, "three", num_rows), dtype, 32)


@pytest.mark.parametrize("num_inputs", [8, 64, 256, 520, 4096, 14336])
def test_inputs_of_any_number_of_splits(open_ops, rng, num_inputs):
    check(open_ops("bfloat16"), lora_case(rng, "bfloat16", "two", 40, num_inputs), "bfloat16", 16)


@pytest.mark.parametrize(("num_parts", "num_inputs"), [(3, 4096), (1, 4096), (2, 4096), (1, 14336)])
def test_speed(open_ops, rng, num_parts, num_inputs):
    """64 rows of 32 adapters of rank 16: the products of Llama-3.1-8B, in memory for several sets."""
    ops, num_slots, rank = open_ops("bfloat16"), 32, 16
    a = normal(rng, (num_slots, num_parts, rank, num_inputs), "bfloat16")
    x, rows = ops.upload(normal(rng, (64, num_inputs), "bfloat16")), np.arange(64, dtype=np.int32)
    tiles = np.array([(slot, 2 * slot, 2) for slot in range(num_slots)], np.int32)
    adapters = AdapterRows(ops.upload(rows), ops.upload(tiles), 16)
    ranks, ends = ops.upload(np.full(num_slots, rank, np.int32)), (8,) * num_parts
    b = ops.empty((num_slots, ends[-1], rank), a.dtype)
    matrices = [AdapterMatrix(ops.upload(a), b, ranks, ends) for _ in range(4)]
    seconds = seconds_of(ops, [lambda matrix=matrix: ops.lora_shrink(x, matrix, adapters) for matrix in matrices])
    report_bandwidth(f"lora_shrink {num_slots} adapters, {num_parts} x {rank} x {num_inputs}", a.nbytes, seconds)
