"""The interface of `CudaDevice` to kernel-launching modules; tests implement it without a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from model.ops.weight import Array


class TensorMapSource(Protocol):
    """`TensorMaps`."""

    def get(self, array: Array, sizes: tuple[int, ...], box: tuple[int, ...], item_bytes: int = 2) -> np.ndarray: ...


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

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        threads: int = ...,
        shared_bytes: int = ...,
        overlaps: bool = ...,
        cluster: int = ...,
        **defines: int,
    ) -> None:
        """Launch one kernel; see `CudaDevice.launch`."""

    def most_clusters(self, name: str, cluster: int, *, threads: int, shared_bytes: int, **defines: int) -> int:
        """Return how many clusters run at once; 0 while the kernel is compiled."""
