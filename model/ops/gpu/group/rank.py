"""One GPU as a rank of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import cupy
import numpy as np
from cuda.bindings import driver

from model.ops.gpu.group.vocabulary import sample_part
from model.ops.gpu.kernels import Kernels, is_there
from model.ops.gpu.ops import CudaOps
from model.ops.interface import Array, SamplingArrays, TokenCandidates


class CudaRank(CudaOps):
    """`CudaOps` on a device that `use` selects. One thread uses all ranks of a group."""

    def __init__(self, device_id: int, dtype: np.dtype, kv_dtype: np.dtype | None = None):
        """Raise ValueError for dtypes without kernels, or CuPy's RuntimeErrors without this device."""
        self._device = cupy.cuda.Device(device_id)
        self._device.use()
        super().__init__(dtype, kv_dtype)
        self.device_id = device_id
        self.label = f"cuda:{device_id}, {self.device_name}, {self._device.pci_bus_id}"
        self._loaded: set[int] = set()

    @property
    def is_capturing(self) -> bool:
        return self._is_capturing

    def use(self) -> None:
        self._device.use()

    def shared(self, num_bytes: int) -> Array:
        """Return uint8[num_bytes] of zeros."""
        memory = self.empty((num_bytes,), np.dtype(np.uint8))
        memory.data.memset_async(0, num_bytes, self.stream)
        return memory

    def load_kernel(self, name: str, **defines: int) -> bool:
        """Compile and load a kernel, so that its launch neither waits nor allocates; return False while kernels are
        compiled ahead."""
        kernel = self.kernels.get(name, **{"QUIRE_DTYPE": self.dtype_code, **defines})
        if not is_there(kernel):
            return False
        if kernel.ptr not in self._loaded:  # else the driver would load it at its first launch, and wait for the device
            [status] = driver.cuFuncLoad(driver.CUfunction(kernel.ptr))
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{name} cannot be loaded on {self.label}: {status.name}")
            self._loaded.add(kernel.ptr)
        return True

    def begin_capture(self) -> None:
        self.stream.begin_capture()
        self._is_capturing = True

    def end_capture(self) -> Callable[[], None]:
        """Return a function that replays the launches since `begin_capture`."""
        self._is_capturing = False
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return partial(graph.launch, self.stream)

    def compile_ahead(self, work: Callable[[], None], others: Sequence[CudaRank] = ()) -> None:
        """See `Kernels.compile_ahead`."""
        kernels: list[Kernels] = [each.kernels for each in others]
        self.kernels.compile_ahead(work, kernels)

    def share_tuning(self, other: CudaRank) -> None:
        """Use the algorithms measured by `other`, so that equal products on two ranks have equal bits."""
        self._linear.share_tuning(other._linear)

    def sample_part(self, logits: Array, params: SamplingArrays, first_token: int) -> TokenCandidates:
        return sample_part(self, logits, params, first_token)
