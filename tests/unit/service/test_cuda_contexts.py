"""Contexts that are created ahead, on a driver of the test's."""

from __future__ import annotations

import ctypes

import pytest

from service import cuda_contexts


class Driver:
    """Has `num_devices`; writes down whose contexts it creates."""

    def __init__(self, num_devices: int):
        self.num_devices, self.retained = num_devices, []

    def cuInit(self, flags: int) -> int:
        return 0 if self.num_devices else 100

    def cuDeviceGet(self, device, number: int) -> int:
        device._obj.value = 10 + number
        return 0 if number < self.num_devices else 101

    def cuDevicePrimaryCtxRetain(self, context, device: ctypes.c_int) -> int:
        self.retained.append(device.value)
        return 0


@pytest.mark.parametrize(
    ("num_devices", "wanted", "created"), [(2, 1, [10]), (2, 2, [10, 11]), (1, 3, [10]), (0, 1, [])]
)
def test_wanted_devices_get_contexts(monkeypatch, num_devices, wanted, created):
    driver = Driver(num_devices)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    cuda_contexts.create_contexts(wanted).join()
    assert driver.retained == created


def test_a_machine_without_a_driver_goes_on(monkeypatch):
    monkeypatch.setattr(cuda_contexts, "LIBRARY", "libabsent.so.1")
    cuda_contexts.create_contexts(1).join()
