"""Copies between the cache and pinned memory: correctness, overlap, speed."""

import time

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import report_bandwidth

pytestmark = pytest.mark.gpu

BLOCK = (32, 2, 8, 16, 128)  # 2 MiB in float16, as of the Llama-3.1-8B shape


def wait_until_ready(host, num_blocks):
    while host.num_ready < num_blocks:
        assert host.failure is None
        time.sleep(0.001)


@pytest.fixture(scope="module")
def ops(open_ops):
    return open_ops("float16")


def test_blocks_go_out_and_come_back_as_on_numpy(ops, rng):
    kv = rng.standard_normal((12, 2, 2, 1, 8, 16)).astype(np.float16)
    on_device, reference = ops.upload(kv), NumpyOps(np.dtype(np.float16))
    host, reference_host = ops.host_blocks(on_device, 7), reference.host_blocks(kv, 7)
    wait_until_ready(host, 7)
    for each in (host, reference_host):
        each.copy_out([3, 9, 0], [6, 1, 4]).wait()
        transfer = each.copy_in([4, 6], [9, 11])
        transfer.wait()
        assert transfer.is_done()
        assert transfer.seconds() >= 0
    np.testing.assert_array_equal(ops.download(on_device), kv)
    host.close()


def test_a_transfer_waits_for_the_work_before_it(ops):
    kv = ops.empty((4, *BLOCK), ops.dtype)
    host = ops.host_blocks(kv, 4)
    wait_until_ready(host, 4)
    ids = [ops.upload(np.array(one, np.int32)) for one in ([0, 1], [2, 3])]
    ops.stream.synchronize()
    with ops.stream:
        kv[:2] = 7
        kv[2:] = 1
    for _ in range(200):
        ops.copy_blocks(kv, *ids)
    host.copy_out([2, 3], [0, 1]).wait()
    host.copy_in([0, 1], [0, 1]).wait()
    assert (ops.download(kv) == 7).all()
    host.close()


@pytest.mark.whole_gpu
def test_bandwidth_both_ways(ops):
    num_blocks = 256
    kv = ops.empty((2 * num_blocks, *BLOCK), ops.dtype)
    begin_s = time.perf_counter()
    host = ops.host_blocks(kv, 2 * num_blocks)
    asked_s = time.perf_counter() - begin_s
    wait_until_ready(host, 2 * num_blocks)
    pinned_s = time.perf_counter() - begin_s
    print(f"\npinning {kv.nbytes >> 20} MiB: {pinned_s:.2f} s, of which the caller waited {1e3 * asked_s:.1f} ms")
    out, back = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
    num_bytes = kv.nbytes // 2
    for name, copy in (("out", host.copy_out), ("in", host.copy_in)):
        for _ in range(2):  # the first one warms up
            transfer = copy(out, out)
            transfer.wait()
        report_bandwidth(f"copy_{name} {num_blocks} x 2 MiB", num_bytes, transfer.seconds())
    begin_s = time.perf_counter()
    transfers = [host.copy_out(out, out), host.copy_in(back, back)]
    submitted_s = time.perf_counter() - begin_s
    for transfer in transfers:
        transfer.wait()
    both_s = time.perf_counter() - begin_s
    report_bandwidth("both at once", 2 * num_bytes, both_s)
    print(f"{1e6 * submitted_s / (2 * num_blocks):.2f} us a block to ask for")
    assert both_s < sum(transfer.seconds() for transfer in transfers), "the two directions wait for one another"
    host.close()
