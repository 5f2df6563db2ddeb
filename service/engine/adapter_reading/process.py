"""Engine side of the process that reads adapters, which keeps that work off the interpreter that runs steps."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.adapter import LoraAdapter, adapter_bytes
from service.engine.adapter_reading.memories import Pin, SharedMemories
from service.engine.adapter_reading.messages import ReadAdapter
from service.engine.adapter_reading.sharing import NUM_PROCESSES, ReadingOptions, send_memory
from service.import_root import python_path

CHILD = f"{__package__}.child"
PASSED_ON = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables passed on; others may be secret."""

EXIT_WAIT_S = 2.0


class AdapterProcess:
    """Process that reads adapters, one at a time; restarted if it has died."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype,
        max_rank: int,
        pin: Pin | None = None,
        *,
        with_experts: bool = False,
        num_processes: int = NUM_PROCESSES,
    ):
        """Start the process, which takes a while to be ready and then forks the others. Raises OSError."""
        self._hello = (ReadingOptions(config, dtype, max_rank, with_experts), num_processes)
        self._memories = SharedMemories(adapter_bytes(config, dtype, max_rank, with_experts=with_experts), pin)
        self._start()

    def read(self, directory: Path) -> LoraAdapter:
        """Read an adapter; see `read_adapter`. Raises ModelError, also if the process dies twice."""
        try:
            try:
                return self._read(directory)
            except (EOFError, OSError):
                self.close()
                self._start()
                return self._read(directory)
        except (EOFError, OSError) as error:
            raise ModelError(f"{directory}: the process that reads adapters has ended ({error!r})") from error

    def close(self) -> None:
        self._end()

    def _start(self) -> None:
        ours, its = socket.socketpair()
        environ = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        with its:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", CHILD, str(its.fileno())],
                    env={**environ, "PYTHONPATH": python_path(os.environ), "OPENBLAS_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                )
            except OSError:
                ours.close()
                raise
        self._link = connection.Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self._link, process)
        self._num_sent = 0  # memories sent to the process
        self._link.send(self._hello)

    def _read(self, directory: Path) -> LoraAdapter:
        """Read an adapter. If the process dies, the memory is lost, as one of its forks may still write there."""
        number = self._memories.take()
        self._send_memories()
        self._link.send((directory, number, ()))
        reply = self._link.recv()
        if isinstance(reply, ModelError):
            self._memories.give_back(number)
            raise reply
        assert isinstance(reply, ReadAdapter)
        adapter = reply.placed_in(self._memories.array(number))
        with suppress(OSError):  # the next read finds a new memory mapped, unless the process has died
            self._send_memories()
        return adapter

    def _send_memories(self) -> None:
        descriptors = self._memories.descriptors
        while self._num_sent < len(descriptors):
            send_memory(self._link, self._num_sent, descriptors[self._num_sent])
            self._num_sent += 1


def _end(link: connection.Connection, process: subprocess.Popen[bytes]) -> None:
    link.close()  # it exits if it waits for a folder
    try:
        process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
