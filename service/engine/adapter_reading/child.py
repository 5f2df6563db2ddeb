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
from model.weights.lora.adapter import adapter_bytes, read_adapter
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
    """Answer (folder, numbers of the memories that are free again) with a ReadAdapter or a ModelError.

    The descriptor of a new memory follows.
    """
    config, dtype, max_rank, with_experts = link.recv()
    memories = _Memories(adapter_bytes(config, dtype, max_rank, with_experts=with_experts))
    while True:
        memories.make_one()
        directory, returned = link.recv()
        memories.free += returned
        memory = memories.free.pop()
        try:
            adapter = _read(directory, config, dtype, max_rank, with_experts, memories, memory)
        except (ModelError, OSError) as error:
            memories.free.append(memory)
            link.send(error if isinstance(error, ModelError) else ModelError(f"{directory}: {error}"))
            continue
        link.send(adapter)
        memories.send_new(link, memory)


def _read(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype,
    max_rank: int,
    with_experts: bool,
    memories: _Memories,
    number: int,
) -> ReadAdapter:
    memory = np.frombuffer(memories.maps[number], np.uint8)
    first = address_of(memory)

    def place(array: np.ndarray) -> Place:
        return address_of(array) - first, array.shape

    adapter = read_adapter(directory, config, dtype, max_rank, lambda count: memory[:count], with_experts=with_experts)
    products = {
        product: {part: (place(a), place(b)) for part, (a, b) in parts.items()}
        for product, parts in adapter.products.items()
    }
    return ReadAdapter(adapter.digest, adapter.rank, adapter.num_bytes, dtype, number, products)


class _Memories:
    """Shared memories of `num_bytes`."""

    def __init__(self, num_bytes: int):
        self._num_bytes = num_bytes
        self.maps: list[mmap.mmap] = []
        self.free: list[int] = []
        self._new: dict[int, int] = {}  # descriptors that the engine does not have

    def make_one(self) -> None:
        """Have one free, whose pages are there: 84 MB of new ones take longer than to read them."""
        if self.free:
            return
        descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, self._num_bytes)
        self.maps.append(mmap.mmap(descriptor, self._num_bytes))
        np.frombuffer(self.maps[-1], np.uint8)[:: mmap.PAGESIZE] = 0
        self.free.append(len(self.maps) - 1)
        self._new[self.free[-1]] = descriptor

    def send_new(self, link: connection.Connection, number: int) -> None:
        descriptor = self._new.pop(number, None)
        if descriptor is not None:
            reduction.send_handle(link, descriptor, None)
            os.close(descriptor)


if __name__ == "__main__":
    main()
