"""Processes that read one adapter together."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.modules import PlannedModule, read_modules
from model.weights.safetensors_file import StoredFile

NUM_PROCESSES = max(1, min(8, len(os.sched_getaffinity(0)) // 2))


class ReadingOptions(NamedTuple):
    """Arguments of `read_adapter` and `adapter_bytes` that are the same for every adapter."""

    config: ModelConfig
    dtype: np.dtype
    max_rank: int
    with_experts: bool


class ShareReaders:
    """`OtherReaders` as forked processes, which end once this one closes their sockets or dies. All calls raise
    EOFError if one of them has died."""

    def __init__(self, count: int, dtype: np.dtype, inherited: connection.Connection):
        """Fork before this process has threads. The forks close the socket `inherited`."""
        self._links: list[connection.Connection] = []
        self._num_awaited = 0
        self._memory = 0
        for _ in range(count):
            ours, its = connection.Pipe()
            if os.fork() == 0:
                for link in (*self._links, ours, inherited):
                    link.close()
                _run(its, dtype)
            its.close()
            self._links.append(ours)

    @property
    def count(self) -> int:
        return len(self._links)

    def add_memory(self, number: int, descriptor: int) -> None:
        """Map a memory in the processes."""
        with _no_os_errors():
            for link in self._links:
                send_memory(link, number, descriptor)

    def use_memory(self, number: int) -> None:
        """Make later reads write to this memory."""
        self._memory = number

    def start(self, path: Path, shares: Sequence[Sequence[PlannedModule]]) -> None:
        with _no_os_errors():
            for link, share in zip(self._links, shares, strict=True):
                link.send((path, self._memory, share))
        self._num_awaited = len(self._links)

    def digests(self) -> Sequence[Sequence[bytes]]:
        replies = self._replies()
        for reply in replies:
            if isinstance(reply, ModelError):
                raise reply
        return replies

    def wait(self) -> None:
        """Wait until no process writes to a memory."""
        self._replies()

    def _replies(self) -> list[Any]:
        links = self._links[: self._num_awaited]
        self._num_awaited = 0
        with _no_os_errors():
            return [link.recv() for link in links]


@contextmanager
def _no_os_errors() -> Iterator[None]:
    """Turn OSError of the link into EOFError, as files raise OSError too."""
    try:
        yield
    except OSError as error:
        raise EOFError from error


def send_memory(link: connection.Connection, number: int, descriptor: int) -> None:
    """Send (None, number, ()), then the descriptor."""
    link.send((None, number, ()))
    reduction.send_handle(link, descriptor, None)


def mapped(descriptor: int) -> np.ndarray:
    """Return a memory, uint8[n], with its pages mapped now rather than on first use; close its descriptor."""
    try:
        size, flags = os.fstat(descriptor).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(descriptor, size, flags=flags), np.uint8)
    finally:
        os.close(descriptor)


def _run(link: connection.Connection, dtype: np.dtype) -> None:
    """Serve in a forked process, and exit without the parent's cleanup."""
    try:
        _serve(link, dtype)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _serve(link: connection.Connection, dtype: np.dtype) -> None:
    memories: dict[int, np.ndarray] = {}
    while True:
        path, number, modules = link.recv()
        if path is None:
            memories[number] = mapped(reduction.recv_handle(link))
            continue
        try:
            reply: object = read_modules(StoredFile(path), modules, memories[number], dtype)
        except (ModelError, OSError) as error:
            reply = error if isinstance(error, ModelError) else ModelError(f"{path}: {error}")
        link.send(reply)
