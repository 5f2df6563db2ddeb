"""Launches a kernel so that it may begin before the one ahead of it has ended; CuPy has no call for that.

The driver calls it programmatic dependent launch, from sm_90 on. The kernel has to wait for the one ahead by itself:
`wait_for_previous_kernel` in cuda/types.cuh.
"""

from __future__ import annotations

import ctypes

import numpy as np
from cupy.cuda import Stream
from cupy.cuda.function import Function

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_MAX_ARGS = 64
_WORD_BYTES = 8


class LaunchError(Exception):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; of the 64 bytes of its value the first four are used."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
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
    """The driver's launch call with the attribute that lets a kernel begin early.

    The driver has copied all it is given when it answers, so every launch writes to the same memory: a step has some
    three hundred of them, and making what they are described with anew took longer than all else. For one thread.
    """

    def __init__(self, stream: Stream, driver: ctypes.CDLL | None = None):
        """Raises OSError without a driver."""
        driver = driver or ctypes.CDLL("libcuda.so.1")
        self._launch = driver.cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4
        self._values = (ctypes.c_uint64 * _MAX_ARGS)()  # a number of four bytes is the first half of one
        first = ctypes.addressof(self._values)
        self._places = [first + _WORD_BYTES * index for index in range(_MAX_ARGS)]
        self._addresses = (ctypes.c_void_p * _MAX_ARGS)(*self._places)
        self._addresses_at = ctypes.addressof(self._addresses)
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(
            block=(1, 1, 1), stream=stream.ptr, attributes=ctypes.pointer(self._attribute), num_attributes=1
        )
        self._config_at = ctypes.addressof(self._config)

    def __call__(self, kernel: Function, grid: tuple[int, ...], threads: int, args: tuple, shared_bytes: int) -> None:
        """`args` are CuPy arrays, None for a null pointer, NumPy scalars, tensor maps. Raises LaunchError."""
        maps = self._write(args)
        config = self._config
        config.grid[:] = (*grid, *(1,) * (3 - len(grid)))
        config.block[0] = threads
        config.shared_bytes = shared_bytes
        status = self._launch(self._config_at, kernel.ptr, self._addresses_at, None)
        for index in maps:
            self._addresses[index] = self._places[index]
        if status != 0:
            raise LaunchError(f"cuLaunchKernelEx answered {status} to {grid} blocks of {threads} threads")

    def _write(self, args: tuple) -> list[int]:
        """Where the driver will look for them; the places of those that lie elsewhere."""
        values, maps = self._values, []
        for index, arg in enumerate(args):
            kind = type(arg)
            if kind is np.int32 or kind is np.int64:
                values[index] = arg.item()
            elif kind is np.float32:
                values[index] = arg.view(np.uint32).item()
            elif arg is None:
                values[index] = 0
            elif kind is np.ndarray:  # a tensor map, which goes by value
                self._addresses[index] = arg.ctypes.data
                maps.append(index)
            else:
                values[index] = arg.data.ptr
        return maps
