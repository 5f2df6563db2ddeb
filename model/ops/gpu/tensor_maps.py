"""Tensor maps of Hopper's copy engine."""

from __future__ import annotations

import ctypes
import itertools
import operator
from functools import lru_cache

import numpy as np
from cuda.bindings import driver

from model.ops.interface import Array

_BYTES = 128
_REMEMBERED = 2048
_TYPES = {
    1: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    2: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
}
_SWIZZLES = {
    1: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    2: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


class TensorMaps:
    """Makes tensor maps and caches the most recent."""

    def __init__(self) -> None:
        self._encode = lru_cache(_REMEMBERED)(_encode)

    def get(
        self,
        array: Array,
        sizes: tuple[int, ...],
        box: tuple[int, ...],
        item_bytes: int = 2,
        strides: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """Return a map of elements of these `sizes`, copied in boxes; fastest dimension first. `strides` of the others
        are in elements (default: contiguous).

        Boxes of 16-bit elements arrive in the 128-byte swizzle (`box[0]` is 64), boxes of bytes row after row; elements
        outside the array are zero. A kernel takes the map by value, as a `__grid_constant__`. Raises ValueError if the
        driver refuses.
        """
        if strides is None:
            strides = tuple(itertools.accumulate(sizes[:-1], operator.mul))
        return self._encode(array.data.ptr, sizes, box, item_bytes, strides, _SWIZZLES[item_bytes])


def _encode(
    address: int,
    sizes: tuple[int, ...],
    box: tuple[int, ...],
    item_bytes: int,
    strides: tuple[int, ...],
    swizzle: driver.CUtensorMapSwizzle,
) -> np.ndarray:
    status, encoded = driver.cuTensorMapEncodeTiled(
        _TYPES[item_bytes],
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride * item_bytes) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"no tensor map of {sizes} in boxes of {box} at {address:#x}: {status.name}")
    return np.frombuffer(ctypes.string_at(int(encoded.getPtr()), _BYTES), f"V{_BYTES}")
