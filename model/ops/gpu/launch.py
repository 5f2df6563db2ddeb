"""Launches kernels in clusters, or before their predecessor ends; CuPy can do neither.

The early start is programmatic dependent launch (from sm_90 on); the kernel calls `wait_for_previous_kernel`
(cuda/common/types.cuh).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cupy.cuda import Stream
from cupy.cuda.function import Function

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_ARGS = 64
_WORD_BYTES = 8


class LaunchError(Exception):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value has 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("more", ctypes.c_int * 2),
        ("rest", ctypes.c_char * 52),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class OverlappedLaunch:
    """The driver's launch call with attributes, for one thread.

    The driver copies the arguments during the call, so all launches reuse the same memory.
    """

    def __init__(self, stream: Stream, driver: ctypes.CDLL | None = None):
        """Raise OSError without a driver."""
        self._driver = driver = driver or ctypes.CDLL("libcuda.so.1")
        self._launch = driver.cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4
        self._values = (ctypes.c_uint64 * _MAX_ARGS)()  # 4-byte values use the low half
        first = ctypes.addressof(self._values)
        self._places = [first + _WORD_BYTES * index for index in range(_MAX_ARGS)]
        self._addresses = (ctypes.c_void_p * _MAX_ARGS)(*self._places)
        self._addresses_at = ctypes.addressof(self._addresses)
        self._attributes = (_Attribute * 2)()
        self._attributes[0] = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._attributes[1] = _Attribute(id=_CLUSTER_DIMENSION, more=(1, 1))
        self._from = [ctypes.pointer(attribute) for attribute in self._attributes]
        self._config = _Config(block=(1, 1, 1), stream=stream.ptr)
        self._config_at = ctypes.addressof(self._config)

    def __call__(
        self,
        kernel: Function,
        grid: tuple[int, ...],
        threads: int,
        args: tuple[Any, ...],
        shared_bytes: int,
        *,
        overlaps: bool = True,
        cluster: int = 1,
    ) -> None:
        """Launch with CuPy arrays, None for null, NumPy scalars and tensor maps. Raises LaunchError."""
        maps = self._write(args)
        self._describe(grid, threads, shared_bytes, overlaps, cluster)
        status = self._launch(self._config_at, kernel.ptr, self._addresses_at, None)
        for index in maps:
            self._addresses[index] = self._places[index]
        if status != 0:
            raise LaunchError(f"cuLaunchKernelEx answered {status} to {grid} blocks of {threads} threads")

    def most_clusters(self, kernel: Function, cluster: int, threads: int, shared_bytes: int) -> int:
        """Return how many clusters can run at once. Raises LaunchError."""
        found = ctypes.c_int()
        self._describe((cluster,), threads, shared_bytes, False, cluster)
        status = self._driver.cuOccupancyMaxActiveClusters(
            ctypes.byref(found), ctypes.c_void_p(kernel.ptr), ctypes.c_void_p(self._config_at)
        )
        if status != 0:
            raise LaunchError(f"cuOccupancyMaxActiveClusters answered {status} to clusters of {cluster}")
        return found.value

    def _describe(self, grid: tuple[int, ...], threads: int, shared_bytes: int, overlaps: bool, cluster: int) -> None:
        config = self._config
        config.grid[:] = (*grid, *(1,) * (3 - len(grid)))
        config.block[0] = threads
        config.shared_bytes = shared_bytes
        self._attributes[1].value = cluster
        config.attributes = self._from[0 if overlaps else 1]
        config.num_attributes = overlaps + (cluster > 1)

    def _write(self, args: tuple[Any, ...]) -> list[int]:
        """Write the arguments; return the indexes of tensor maps."""
        values, maps = self._values, []
        for index, arg in enumerate(args):
            kind = type(arg)
            if kind is np.int32 or kind is np.int64:
                values[index] = arg.item()
            elif kind is np.float32:
                values[index] = arg.view(np.uint32).item()
            elif arg is None:
                values[index] = 0
            elif kind is np.ndarray:  # a tensor map, by value
                self._addresses[index] = arg.ctypes.data
                maps.append(index)
            else:
                values[index] = arg.data.ptr
        return maps
