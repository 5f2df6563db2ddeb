import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [*DTYPES, "uint8"])
@pytest.mark.parametrize("shape", [(40, 2, 2, 2, 16, 64), (12, 3, 2, 1, 8, 80), (9, 1, 2, 1, 8, 16)])
@pytest.mark.parametrize("num_pairs", [0, 1, 4])
def test_blocks_are_exact_and_ids_outside_the_pool_are_ignored(open_ops, rng, dtype, shape, num_pairs):
    if dtype == "uint8":  # a cache in e4m3
        ops, reference = open_ops("bfloat16", np.dtype(np.uint8)), NumpyOps()
        kv = rng.integers(0, 256, shape, np.uint8)
    else:
        ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
        kv = normal(rng, shape, dtype)
    ids = rng.permutation(shape[0])[: 2 * num_pairs].astype(np.int32)
    beyond = np.array([-1, 0, shape[0], 1, 2**31 - 1], np.int32)  # rolled by one, each pair has an unknown id
    sources = np.concatenate([ids[:num_pairs], beyond])
    targets = np.concatenate([ids[num_pairs:], np.roll(beyond, 1)])
    on_device = ops.upload(kv)
    ops.copy_blocks(on_device, ops.upload(sources), ops.upload(targets))
    reference.copy_blocks(kv, sources, targets)
    np.testing.assert_array_equal(ops.download(on_device).astype(np.float32), kv.astype(np.float32))


def test_speed(open_ops, rng):
    """Llama-3.1-8B: a block of 16 tokens is 2 MiB."""
    ops, num_blocks = open_ops("bfloat16"), 256
    kv = ops.empty((num_blocks, 32, 2, 8, 16, 128), ops.dtype)
    order = rng.permutation(num_blocks).astype(np.int32)
    half = num_blocks // 2
    sources, targets = ops.upload(order[:half]), ops.upload(order[half:])
    seconds = seconds_of(ops, [lambda: ops.copy_blocks(kv, sources, targets)])
    report_bandwidth("copy_blocks 128 x 2 MiB", 2 * half * (kv.nbytes // num_blocks), seconds)
