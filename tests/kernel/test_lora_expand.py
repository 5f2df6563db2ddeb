import numpy as np
import pytest

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of
from tests.support.lora_cases import PARTS, lora_case

pytestmark = pytest.mark.gpu


def check(ops, rng, case, dtype: str, tile_rows: int, num_splits: int = 3) -> None:
    """`shrunk` has several summands and holds NaN where it is undefined; rows without an adapter keep their bits."""
    reference = NumpyOps(NUMPY_DTYPES[dtype])
    whole = case.known(reference.lora_shrink(case.x, case.matrix, case.rows))
    if not whole.size:
        return
    expected = case.out.copy()
    reference.lora_expand(whole[None], case.matrix, case.rows, expected)
    shares = rng.dirichlet(np.ones(num_splits)).astype(np.float32)
    shrunk = np.full((num_splits, len(case.x), *whole.shape[1:]), np.nan, np.float32)
    for slot, first, count in case.rows.tiles:
        rows, rank = slice(first, first + count), case.matrix.ranks[slot]
        shrunk[:, rows, :, :rank] = shares[:, None, None, None] * whole[rows, :, :rank]
    out = ops.upload(case.out)
    ops.lora_expand(ops.upload(shrunk), *case.on(ops, tile_rows), out)
    assert_close(ops.download(out), expected, dtype)
    others = np.setdiff1d(np.arange(len(case.x)), case.rows.rows)
    np.testing.assert_array_equal(ops.download(out)[others], case.out[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 64, 200, 512])
def test_rows_of_mixed_ranks(open_ops, rng, dtype, parts, num_rows):
    check(open_ops(dtype), rng, lora_case(rng, dtype, parts, num_rows), dtype, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [5, 33, 2100])
def test_large_tiles(open_ops, rng, dtype, num_rows):
    check(open_ops(dtype), rng, lora_case(rng, dtype, "three", num_rows), dtype, 32)


@pytest.mark.parametrize("num_splits", [1, 16])
def test_any_number_of_summands(open_ops, rng, num_splits):
    check(open_ops("bfloat16"), rng, lora_case(rng, "bfloat16", "two", 40), "bfloat16", 16, num_splits)


@pytest.mark.parametrize("ends", [(4096, 5120, 6144), (4096,), (14336, 28672)], ids=str)
def test_speed(open_ops, rng, ends):
    """64 rows of 32 adapters of rank 16: the products of Llama-3.1-8B, in memory for several sets."""
    ops, num_slots, rank = open_ops("bfloat16"), 32, 16
    b = normal(rng, (num_slots, ends[-1], rank), "bfloat16")
    out = ops.upload(normal(rng, (64, ends[-1]), "bfloat16"))
    shrunk = ops.upload(normal(rng, (1, 64, len(ends), rank), "float32"))
    tiles = np.array([(slot, 2 * slot, 2) for slot in range(num_slots)], np.int32)
    adapters = AdapterRows(ops.upload(np.arange(64, dtype=np.int32)), ops.upload(tiles), 16)
    ranks = ops.upload(np.full(num_slots, rank, np.int32))
    a = ops.empty((num_slots, len(ends), rank, 8), b.dtype)
    matrices = [AdapterMatrix(a, ops.upload(b), ranks, ends) for _ in range(4)]
    launches = [lambda matrix=matrix: ops.lora_expand(shrunk, matrix, adapters, out) for matrix in matrices]
    num_bytes = b.nbytes + 2 * out.nbytes
    report_bandwidth(f"lora_expand {num_slots} adapters, {ends[-1]} x {rank}", num_bytes, seconds_of(ops, launches))
