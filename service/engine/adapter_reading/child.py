"""Process that reads adapters into shared memory.

Started by `process.py` as python -P -m service.engine.adapter_reading.child <socket fd>. It ends once the engine closes
the socket or dies.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from multiprocessing import connection, reduction
from pathlib import Path

import numpy as np

from model.errors import ModelError
from model.weights.lora.adapter import read_adapter
from service.engine.adapter_reading.messages import Place, ReadAdapter, address_of
from service.engine.adapter_reading.sharing import ReadingOptions, ShareReaders, mapped


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the process group; the engine ends first
    try:
        with connection.Connection(int(sys.argv[1])) as link:
            serve(link)
    except (EOFError, OSError):  # the engine has closed its end
        return


def serve(link: connection.Connection) -> None:
    """Answer (folder, memory number, ()) with a ReadAdapter or a ModelError; `send_memory` precedes it."""
    options, num_processes = link.recv()
    readers = ShareReaders(num_processes - 1, options.dtype, link)
    memories: dict[int, np.ndarray] = {}
    while True:
        directory, number, _ = link.recv()
        if directory is None:
            descriptor = reduction.recv_handle(link)
            readers.add_memory(number, descriptor)
            memories[number] = mapped(descriptor)
            continue
        try:
            reply: ReadAdapter | ModelError = _read(directory, number, options, memories[number], readers)
        except (ModelError, OSError) as error:
            readers.wait()
            reply = error if isinstance(error, ModelError) else ModelError(f"{directory}: {error}")
        link.send(reply)


def _read(
    directory: Path, number: int, options: ReadingOptions, memory: np.ndarray, readers: ShareReaders
) -> ReadAdapter:
    config, dtype, max_rank, with_experts = options
    first = address_of(memory)

    def new_bytes(count: int) -> np.ndarray:
        return memory[:count]

    def place(array: np.ndarray) -> Place:
        return address_of(array) - first, array.shape

    others = readers if readers.count else None
    readers.use_memory(number)
    adapter = read_adapter(directory, config, dtype, max_rank, new_bytes, with_experts=with_experts, others=others)
    products = {
        product: {part: (place(a), place(b)) for part, (a, b) in parts.items()}
        for product, parts in adapter.products.items()
    }
    layout = hashlib.sha256(repr(products).encode()).hexdigest()
    return ReadAdapter(adapter.digest, adapter.rank, adapter.num_bytes, dtype, products, layout)


if __name__ == "__main__":
    main()
