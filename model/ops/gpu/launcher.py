"""Interface of `CudaDevice` for modules that launch kernels; tests implement it without a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from model.ops.weight import Array


class TensorMapSource(Protocol):
    """Interface of `TensorMaps`."""

    def get(
        self,
        array: Array,
        sizes: tuple[int, ...],
        box: tuple[int, ...],
        item_bytes: int = 2,
        strides: tuple[int, ...] | None = None,
    ) -> np.ndarray: ...


class KernelLauncher(Protocol):
    """A device that launches the kernels of `cuda/`."""

    dtype: np.dtype  # of activations
    dtype_code: int  # QUIRE_DTYPE of the kernels
    arch: str  # "80", "90a"
    num_sms: int
    max_shared_bytes: int

    @property
    def tensor_maps(self) -> TensorMapSource: ...

    def temporary(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """See `Device.temporary`."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """See `CudaDevice.zeros`."""

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        threads: int = ...,
        shared_bytes: int = ...,
        overlaps: bool = ...,
        shared_percent: int = ...,
        cluster: int = ...,
        **defines: int,
    ) -> None:
        """Launch one kernel; see `CudaDevice.launch`."""

    def most_clusters(self, name: str, cluster: int, *, threads: int, shared_bytes: int, **defines: int) -> int:
        """See `CudaDevice.most_clusters`."""


def expect(name: str, array: Array, dtype: np.dtype, *shape: int | None) -> None:
    """Raise ValueError unless `array` is C-contiguous, of this dtype and shape (None: any)."""
    sizes = array.shape
    fits = sizes == shape or (len(sizes) == len(shape) and None in shape and _fits(sizes, shape))
    if not fits or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {sizes}, expected {dtype} {shape}, contiguous")


def _fits(sizes: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return all(wanted is None or size == wanted for size, wanted in zip(sizes, shape, strict=True))
