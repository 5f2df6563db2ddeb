"""One CUDA device: memory, transfers, graphs, events, launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from model.ops.gpu.arena import Arena
from model.ops.gpu.host_blocks import CudaHostBlocks
from model.ops.gpu.kernels import Kernels, arch_of, is_there
from model.ops.gpu.launch import OverlappedLaunch
from model.ops.gpu.launcher import expect as expect
from model.ops.gpu.tensor_maps import TensorMaps
from model.ops.gpu.transfers import Transfers
from model.ops.interface import Array
from model.ops.packing import TableRows

ARENA_CHUNK_BYTES = 256 << 20
"""Chunk size, enough for the temporaries of a layer; larger requests get their own chunk."""

DTYPE_CODES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
"""Values of the kernels' macro QUIRE_DTYPE."""

THREADS = 256

FIRST_WITH_FP8 = 89
"""Compute capability of the first e4m3 tensor cores."""

_INT32 = np.dtype(np.int32)


class CudaDevice:
    """`Device` and `KernelLauncher` on the current CUDA device, for one thread."""

    name = "cuda"
    num_ranks = 1

    launches_early = True
    """Kernels of captured graphs may start before their predecessors end."""

    def __init__(self, dtype: np.dtype, kv_dtype: np.dtype | None = None):
        """Raise ValueError for dtypes without kernels, or CuPy's RuntimeErrors without a GPU."""
        self.dtype = np.dtype(dtype)
        self.kv_dtype = self.dtype if kv_dtype is None else np.dtype(kv_dtype)
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"dtype: {self.dtype} is not supported (float32, float16, bfloat16)")
        if self.kv_dtype not in (self.dtype, np.uint8):
            raise ValueError(f"kv_dtype: {self.kv_dtype} is not supported ({self.dtype}, as the activations, or fp8)")
        device = cupy.cuda.Device()
        self.device_name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        self.dtype_code = DTYPE_CODES[self.dtype]
        self.num_sms = device.attributes["MultiProcessorCount"]
        self.arch = arch_of(device.compute_capability)
        self.has_fp8 = int(device.compute_capability) >= FIRST_WITH_FP8
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.kernels = Kernels(self.arch)
        self.tensor_maps = TensorMaps()
        self.max_shared_bytes = device.attributes["MaxSharedMemoryPerBlockOptin"]
        self._arena = Arena(self._allocate, ARENA_CHUNK_BYTES)
        self._launch_overlapped = OverlappedLaunch(self.stream) if int(device.compute_capability) >= 90 else None
        self._is_capturing = False
        self._zeros: dict[tuple[tuple[int, ...], np.dtype], Array] = {}
        self._most_clusters: dict[tuple[Any, ...], int] = {}
        self._transfers = Transfers(self.stream, self.launch)

    def upload(self, host: np.ndarray) -> Array:
        host = np.asarray(host, order="C")
        array = self.empty(host.shape, host.dtype)
        self._transfers.upload(host, array)
        return array

    def upload_all(
        self, hosts: Sequence[np.ndarray], into: Array | None = None, rows: TableRows | None = None
    ) -> list[Array]:
        if rows is not None:
            _expect_rows(*rows)
        return self._transfers.upload_all(hosts, into, rows)

    def load_parallel(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        self._transfers.load_parallel(targets, read)

    def release_staging(self) -> None:
        self._transfers.release_staging()

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        return self._transfers.download_async(arrays)

    def compile_ahead(self, work: Callable[[], None]) -> None:
        self.kernels.compile_ahead(work)

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        (warm_up_run or work)()  # load kernels, plan products, grow the arena
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            self._is_capturing = True
            try:
                work()
            finally:
                self._is_capturing = False
                graph = self.stream.end_capture()
        graph.upload(self.stream)  # else the first replay would upload
        return lambda: graph.launch(self.stream)

    def download(self, array: Array) -> np.ndarray:
        host: np.ndarray = array.get(stream=self.stream)
        return host

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        with self.stream:
            return cupy.empty(shape, dtype)

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        dtype = np.dtype(dtype)
        if not self._arena.is_open:
            return self.empty(shape, dtype)
        return cupy.ndarray(shape, dtype, self._arena.take(math.prod(shape) * dtype.itemsize))

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return the cached array of this shape and dtype, initially zeros; kernels leave it as their next launch needs
        it."""
        key = (shape, np.dtype(dtype))
        if key not in self._zeros:
            array = self._zeros[key] = self.empty(*key)
            # not `upload`: it does nothing while kernels are compiled ahead
            array.data.memset_async(0, array.nbytes, self.stream)
        return self._zeros[key]

    def host_blocks(self, kv: Array, num_blocks: int) -> CudaHostBlocks:
        return CudaHostBlocks(kv, num_blocks, self.stream)

    def memory_bytes(self) -> tuple[int, int]:
        free, total = cupy.cuda.runtime.memGetInfo()
        return free + cupy.get_default_memory_pool().free_bytes(), total

    def scratch(self) -> AbstractContextManager[None]:
        return self._arena.scope()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def record_event(self) -> cupy.cuda.Event:
        event = cupy.cuda.Event()
        event.record(self.stream)
        return event

    def elapsed_s(self, begin: cupy.cuda.Event, end: cupy.cuda.Event) -> float:
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        threads: int = THREADS,
        shared_bytes: int = 0,
        overlaps: bool = False,
        shared_percent: int = 0,
        cluster: int = 1,
        stream: cupy.cuda.Stream | None = None,
        **defines: int,
    ) -> None:
        """Launch a kernel of `cuda/`, built for `self.dtype` by default; an empty grid does nothing.

        `overlaps`: the kernel calls `wait_for_previous_kernel` (common/types.cuh), so in a captured graph it may start
        before its predecessor ends (`launches_early`); outside graphs the host launches too slowly to gain.
        `shared_percent`: see `Kernels.get`. Clusters must run on `self.stream`.
        """
        if 0 in grid:
            return
        defines = {"QUIRE_DTYPE": self.dtype_code, **defines}
        kernel = self.kernels.get(name, shared_bytes=shared_bytes, shared_percent=shared_percent, **defines)
        if not is_there(kernel):
            return
        begins_early = overlaps and self._is_capturing and self.launches_early
        if self._launch_overlapped is not None and (begins_early or cluster > 1):
            self._launch_overlapped(kernel, grid, threads, args, shared_bytes, overlaps=begins_early, cluster=cluster)
        else:
            kernel(grid, (threads,), args, shared_bytes, stream or self.stream)

    def most_clusters(self, name: str, cluster: int, *, threads: int, shared_bytes: int, **defines: int) -> int:
        """Return how many clusters can run at once; 0 while kernels are compiled ahead."""
        key = (name, cluster, shared_bytes, *defines.values())
        if key not in self._most_clusters:
            kernel = self.kernels.get(name, shared_bytes=shared_bytes, **{"QUIRE_DTYPE": self.dtype_code, **defines})
            if self._launch_overlapped is None or not is_there(kernel):
                return 0
            self._most_clusters[key] = self._launch_overlapped.most_clusters(kernel, cluster, threads, shared_bytes)
        return self._most_clusters[key]

    def _allocate(self, num_bytes: int) -> cupy.cuda.MemoryPointer:
        with self.stream:
            return cupy.cuda.alloc(num_bytes)


def _expect_rows(host: np.ndarray, places: np.ndarray, table: Array) -> None:
    expect("table", table, _INT32, None, None)
    fits = host.shape == (len(places), host.shape[1]) and host.shape[1] <= table.shape[1]
    if host.dtype != _INT32 or places.dtype != _INT32 or not fits:
        raise ValueError(f"{host.dtype} {host.shape} at {places.dtype} {places.shape} is no part of {table.shape}")
    if len(places) and not 0 <= places.min() <= places.max() < len(table):
        raise ValueError(f"rows {places.min()} to {places.max()} are outside a table of {len(table)}")
