"""Launches a kernel so that it may begin before the one ahead of it has ended; CuPy has no call for that.

The driver calls it programmatic dependent launch, from sm_90 on. The kernel has to wait for the one ahead by itself:
`wait_for_previous_kernel` in cuda/types.cuh.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cupy.cuda import Stream
from cupy.cuda.function import Function

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_SCALARS = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.float32: ctypes.c_float}


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
    """The driver's launch call with the attribute that lets a kernel begin early."""

    def __init__(self, stream: Stream):
        """Raises OSError without a driver."""
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._stream = stream
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)

    def __call__(self, kernel: Function, grid: tuple[int, ...], threads: int, args: tuple, shared_bytes: int) -> None:
        """`args` are CuPy arrays, None for a null pointer, NumPy scalars, tensor maps. Raises LaunchError."""
        values = [_c_value(arg) for arg in args]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        config = _Config(
            grid=(*grid, *(1,) * (3 - len(grid))),
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=self._stream.ptr,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=1,
        )
        status = self._driver.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(kernel.ptr), addresses, None)
        if status != 0:
            raise LaunchError(f"cuLaunchKernelEx answered {status} to {grid} blocks of {threads} threads")


def _c_value(arg: Any) -> ctypes._SimpleCData | ctypes.Array:
    if arg is None:
        return ctypes.c_void_p(0)
    if isinstance(arg, np.ndarray):  # a tensor map, which goes by value
        return (ctypes.c_char * arg.nbytes).from_buffer_copy(arg)
    scalar = _SCALARS.get(type(arg))
    return ctypes.c_void_p(arg.data.ptr) if scalar is None else scalar(arg.item())
