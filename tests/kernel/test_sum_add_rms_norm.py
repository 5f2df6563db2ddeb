"""Two ranks on one device, each on its own stream: what the kernel adds, for how long it waits, and for whom."""

from types import SimpleNamespace

import numpy as np
import pytest

from model.ops.collectives import NumpyCollectives
from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu
MAX_ROWS = 16


@pytest.fixture
def ranks(open_ops, rng):
    """Two ranks with everything the kernel takes but the arrays of a sum."""

    def make(dtype: str):
        devices = [type(open_ops(dtype))(NUMPY_DTYPES[dtype]) for _ in range(2)]
        zeros = np.zeros((2, MAX_ROWS), np.uint32)
        signals = [ops.upload(zeros) for ops in devices]
        addresses = [ops.upload(addresses_of(signals)) for ops in devices]
        for ops in devices:
            ops.synchronize()  # a rank writes its peers' signals
        return [
            SimpleNamespace(ops=ops, signals=own, num_sums=ops.upload(zeros[0]), error=ops.upload(zeros[0, :1]))
            for ops, own in zip(devices, addresses, strict=True)
        ]

    return make


def addresses_of(arrays) -> np.ndarray:
    return np.array([array.data.ptr for array in arrays], np.uint64)


def start(number: int, rank, parts, residual, weight, out) -> None:
    rows, width = residual.shape
    pointers = rank.ops.upload(addresses_of(parts))
    sizes = np.int32(number), np.int32(MAX_ROWS), np.int32(width), np.float32(1e-6)
    arrays = pointers, rank.signals, rank.num_sums, rank.error, residual, weight, out
    rank.ops.launch("sum_add_rms_norm", (rows,), (*arrays, *sizes), threads=256, NUM_RANKS=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 33, 4096])
def test_sums_in_rank_order(ranks, rng, dtype, width):
    group, reference = ranks(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    weight = normal(rng, (width,), dtype)
    for rows in (1, MAX_ROWS, 3):
        parts = [normal(rng, (rows, width), dtype) for _ in group]
        residual = normal(rng, (rows, width), dtype)
        uploaded = [rank.ops.upload(part) for rank, part in zip(group, parts, strict=True)]
        residuals = [rank.ops.upload(residual) for rank in group]
        outs = [rank.ops.empty((rows, width), rank.ops.dtype) for rank in group]
        for number, rank in enumerate(group):
            start(number, rank, uploaded, residuals[number], rank.ops.upload(weight), outs[number])
        expected = reference.add_rms_norm(NumpyCollectives().sum(parts)[0], residual, weight, 1e-6)
        for rank, own, out in zip(group, residuals, outs, strict=True):
            assert rank.ops.download(own).tobytes() == residual.tobytes()
            assert_close(rank.ops.download(out), expected, dtype)
            assert rank.ops.download(rank.error).tolist() == [0]


def test_a_rank_that_never_comes_is_named_within_five_seconds(ranks, rng):
    rank = ranks("bfloat16")[0]
    arrays = [rank.ops.upload(normal(rng, (2, 64), "bfloat16")) for _ in range(4)]
    weight = rank.ops.upload(normal(rng, (64,), "bfloat16"))
    begin = rank.ops.record_event()
    start(0, rank, arrays[:2], arrays[2], weight, arrays[3])
    assert rank.ops.download(rank.error).tolist() == [2]
    assert rank.ops.elapsed_s(begin, rank.ops.record_event()) < 5
