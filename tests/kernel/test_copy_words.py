"""Small arrays between host and device, past the copy engines."""

import time

import numpy as np
import pytest

from model.ops.packing import TableRows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops(open_ops):
    return open_ops("bfloat16")


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 7, 255, 4096, 70_001, 1_000_003])
def test_bytes_go_there_and_back(ops, rng, num_bytes):
    hosts = [rng.integers(0, 256, size).astype(np.uint8) for size in (num_bytes, 5, num_bytes)]
    on_device = ops.upload_all(hosts)
    kept = [host.copy() for host in hosts]
    for host in hosts:
        host[:] = 0  # it may change at once
    for got, expected in zip(ops.download_async(on_device)(), kept, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (1, 1), (5, 3), (200, 130), (512, 400)])
def test_rows_go_to_their_places(ops, rng, rows, columns):
    table = ops.upload(np.full((600, 401), -1, np.int32))
    host = rng.integers(0, 1 << 30, (rows, columns)).astype(np.int32)
    expected = np.full((600, 401), -1, np.int32)
    places = rng.permutation(600)[:rows].astype(np.int32)
    expected[places, :columns] = host
    other = rng.integers(0, 256, 33).astype(np.uint8)
    (beside,) = ops.upload_all([other], rows=TableRows(host, places, table))
    places[:] = 0  # it may change at once
    np.testing.assert_array_equal(ops.download(table), expected)
    np.testing.assert_array_equal(ops.download(beside), other)


def test_none_waits_behind_blocks_on_their_way(ops):
    kv = ops.empty((512, 32, 2, 8, 16, 128), ops.dtype)
    host = ops.host_blocks(kv, 512)
    while host.num_ready < 512:
        assert host.failure is None
        time.sleep(0.001)
    small, blocks = np.arange(1000, dtype=np.int32), list(range(256))
    there_and_back = ops.download_async(ops.upload_all([small]))
    there_and_back()  # compiled and loaded
    others = [256 + block for block in blocks]
    transfers = [host.copy_in(blocks, blocks), host.copy_out(others, others)]
    begin_s = time.perf_counter()
    (back,) = ops.download_async(ops.upload_all([small]))()
    small_s = time.perf_counter() - begin_s
    still_going = [not transfer.is_done() for transfer in transfers]
    for transfer in transfers:
        transfer.wait()
    host.close()
    np.testing.assert_array_equal(back, small)
    print(f"\n4 KB there and back beside 512 MiB each way: {1e6 * small_s:.0f} us")
    assert all(still_going)
