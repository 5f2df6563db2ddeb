"""Arguments of the driver's launch call, recorded by a fake driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")

from model.ops.gpu.launch import LaunchError, OverlappedLaunch, _Config

KERNEL = SimpleNamespace(ptr=0x1234)
KINDS = {"int": ctypes.c_int32, "long": ctypes.c_int64, "float": ctypes.c_float, "pointer": ctypes.c_void_p}
SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)


class LookingDriver:
    """Notes each launch, its arguments read as these kinds."""

    def __init__(self, *kinds: str, status: int = 0):
        self.launches = []
        self.kinds = kinds
        self._status = status
        self.cuLaunchKernelEx = SIGNATURE(self._look)

    def _look(self, config: int, kernel: int, addresses: int, extra: int | None) -> int:
        at = (ctypes.c_void_p * len(self.kinds)).from_address(addresses)
        values = tuple(map(self._read, self.kinds, at))
        received = _Config.from_address(config)
        attribute = received.attributes[0]
        sizes = (tuple(received.grid), tuple(received.block), received.shared_bytes)
        early = (received.num_attributes, attribute.id, attribute.value)
        self.launches.append((kernel, sizes, received.stream, early, values, extra))
        return self._status

    @staticmethod
    def _read(kind: str, address: int):
        return ctypes.string_at(address, 128) if kind == "map" else KINDS[kind].from_address(address).value


def array_at(address: int) -> SimpleNamespace:
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def launcher(driver: LookingDriver) -> OverlappedLaunch:
    return OverlappedLaunch(SimpleNamespace(ptr=0x77), driver)


def test_arguments_arrive_as_the_kernel_reads_them():
    driver = LookingDriver("pointer", "int", "int", "long", "float", "pointer")
    args = (array_at(0x7F00_0000_1000), np.int32(-5), np.int32(7), np.int64(-(1 << 40)), np.float32(-0.1), None)
    launcher(driver)(KERNEL, (3, 2), 96, args, 1 << 15)
    expected = (0x7F00_0000_1000, -5, 7, -(1 << 40), np.float32(-0.1).item(), None)
    assert driver.launches == [(KERNEL.ptr, ((3, 2, 1), (96, 1, 1), 1 << 15), 0x77, (1, 6, 1), expected, None)]


def test_a_tensor_map_goes_by_value_and_leaves_its_place_to_the_next_launch():
    content = bytes(range(128))
    driver = LookingDriver("map", "int")
    launch = launcher(driver)
    launch(KERNEL, (1,), 32, (np.frombuffer(content, "V128"), np.int32(9)), 0)
    driver.kinds = ("long", "int")
    launch(KERNEL, (4, 5, 6), 64, (np.int64(11), np.int32(8)), 0)
    assert [launched[4] for launched in driver.launches] == [(content, 9), (11, 8)]
    assert driver.launches[1][1] == ((4, 5, 6), (64, 1, 1), 0)


def test_a_refused_launch_is_an_error():
    with pytest.raises(LaunchError, match=r"answered 700 to \(2,\) blocks of 32 threads"):
        launcher(LookingDriver(status=700))(KERNEL, (2,), 32, (), 0)


@pytest.mark.parametrize(("overlaps", "received"), [(True, [(6, 1), (4, 5)]), (False, [(4, 5)])])
def test_a_launch_sets_the_cluster_size_with_or_without_early_start(overlaps, received):
    seen = []

    def look(config: int, *_) -> int:
        config = _Config.from_address(config)
        attributes = [config.attributes[i] for i in range(config.num_attributes)]
        assert all(tuple(one.more) == (1, 1) for one in attributes if one.id == 4)
        seen.append([(one.id, one.value) for one in attributes])
        return 0

    driver = SimpleNamespace(cuLaunchKernelEx=SIGNATURE(look))
    launch = launcher(driver)
    launch(KERNEL, (10,), 32, (), 0, overlaps=overlaps, cluster=5)
    launch(KERNEL, (10,), 32, (), 0)
    assert seen == [received, [(6, 1)]]


def test_a_device_is_asked_how_many_clusters_it_has_room_for():
    def answer(found, kernel, config) -> int:
        config = _Config.from_address(config.value)
        assert (config.num_attributes, config.attributes[0].id, config.attributes[0].value) == (1, 4, 6)
        assert (config.grid[0] % 6, config.block[0], config.shared_bytes) == (0, 384, 1 << 17)
        found._obj.value = 17
        return 0

    driver = LookingDriver()
    driver.cuOccupancyMaxActiveClusters = answer
    assert launcher(driver).most_clusters(KERNEL, 6, 384, 1 << 17) == 17
    driver.cuOccupancyMaxActiveClusters = lambda *_: 1
    with pytest.raises(LaunchError, match="answered 1 to clusters of 6"):
        launcher(driver).most_clusters(KERNEL, 6, 384, 1 << 17)
