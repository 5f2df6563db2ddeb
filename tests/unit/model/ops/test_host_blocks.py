"""Blocks of a cache in the host's memory, on NumPy."""

import numpy as np

from model.ops.cpu.ops import NumpyOps


def test_blocks_go_out_and_come_back_elsewhere():
    ops = NumpyOps()
    kv = np.arange(6 * 2 * 2 * 1 * 4 * 3, dtype=np.float32).reshape(6, 2, 2, 1, 4, 3)
    before = kv.copy()
    host = ops.host_blocks(kv, 4)
    assert (host.num_ready, host.failure) == (4, None)
    out = host.copy_out([1, 5, 2], [3, 0, 1])
    kv[[1, 5, 2]] = -1
    back = host.copy_in([0, 3], [2, 4])
    assert out.is_done()
    assert back.is_done()
    assert min(out.seconds(), back.seconds()) >= 0
    np.testing.assert_array_equal(kv[[2, 4]], before[[5, 1]])
    np.testing.assert_array_equal(kv[[0, 3]], before[[0, 3]])
    host.close()
    assert host.num_ready == 0
