"""The host as a `Device`: all work is done when its call returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from model.ops.cpu.host_blocks import NumpyHostBlocks
from model.ops.interface import Array
from model.ops.load_parallel import Piece, load_in_threads
from model.ops.packing import Packing, TableRows


class NumpyDevice:
    name = "numpy"
    device_name = "CPU"
    num_ranks = 1
    num_sharing = 1  # ranks that share the host's memory

    def use(self) -> None:
        """Do nothing: there is one host."""

    def upload(self, host: np.ndarray) -> Array:
        return np.array(host)

    def upload_all(
        self, hosts: Sequence[np.ndarray], into: Array | None = None, rows: TableRows | None = None
    ) -> list[Array]:
        if rows is not None:
            rows.table[rows.places, : rows.host.shape[1]] = rows.host
        packing = Packing.of(hosts)
        piece = np.empty(packing.num_bytes, np.uint8) if into is None else into
        packing.fill(piece, hosts)
        return packing.views(piece, hosts)

    def load_parallel(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        def work(pieces: Iterator[Piece]) -> None:
            for piece in pieces:
                read(piece.target, piece.start, targets[piece.target].reshape(-1)[piece.start : piece.stop])

        load_in_threads(targets, work)

    def release_staging(self) -> None:
        """Do nothing: `load_parallel` reads into its targets."""

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        copies = [np.array(array) for array in arrays]
        return lambda: copies

    def compile_ahead(self, work: Callable[[], None]) -> None:
        """Do nothing: there is nothing to compile."""

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        (warm_up_run or work)()
        return work

    def download(self, array: Array) -> np.ndarray:
        return np.array(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return np.zeros(shape, dtype)

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return np.empty(shape, dtype)

    def host_blocks(self, kv: Array, num_blocks: int) -> NumpyHostBlocks:
        return NumpyHostBlocks(kv, num_blocks)

    def memory_bytes(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        free_bytes = _available_bytes() or os.sysconf("SC_AVPHYS_PAGES") * page
        return free_bytes // self.num_sharing, os.sysconf("SC_PHYS_PAGES") * page // self.num_sharing

    def scratch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def record_event(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin


def _available_bytes() -> int:
    """Return Linux's estimate, which includes page cache; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
