"""A process that reads adapters into shared memory.

Started by `process.py`: python -P -m service.engine.adapter_reading.child <socket's descriptor>. It ends once the
engine has closed the socket, or has died.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from multiprocessing import connection, reduction
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.adapter import LoraAdapter, read_adapter
from service.engine.adapter_reading.messages import Place, ReadAdapter, address_of


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a process group may get them; the engine ends first
    try:
        with connection.Connection(int(sys.argv[1])) as link:
            serve(link)
    except (EOFError, OSError):  # the engine has closed its end
        return


def serve(link: connection.Connection) -> None:
    """Answer each folder's path with a ReadAdapter and a descriptor of its memory, or with a ModelError."""
    config, dtype, max_rank = link.recv()
    while True:
        directory: Path = link.recv()
        descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC)
        try:
            answer = _read(directory, config, dtype, max_rank, descriptor)
            link.send(answer)
            if isinstance(answer, ReadAdapter):
                reduction.send_handle(link, descriptor, None)
        finally:
            os.close(descriptor)


def _read(
    directory: Path, config: ModelConfig, dtype: np.dtype, max_rank: int, descriptor: int
) -> ReadAdapter | ModelError:
    shared = _SharedMemory(descriptor)
    try:
        return shared.places(read_adapter(directory, config, dtype, max_rank, shared.new_bytes), dtype)
    except ModelError as error:
        return error


class _SharedMemory:
    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._memory = np.empty(0, np.uint8)

    def new_bytes(self, count: int) -> np.ndarray:
        os.ftruncate(self._descriptor, count)
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, count), np.uint8)
        return self._memory

    def places(self, adapter: LoraAdapter, dtype: np.dtype) -> ReadAdapter:
        first = address_of(self._memory)

        def place(array: np.ndarray) -> Place:
            return address_of(array) - first, array.shape

        products = {
            product: {part: (place(a), place(b)) for part, (a, b) in parts.items()}
            for product, parts in adapter.products.items()
        }
        return ReadAdapter(adapter.digest, adapter.rank, adapter.num_bytes, len(self._memory), dtype, products)


if __name__ == "__main__":
    main()
