"""The engine's side of the process that reads adapters: the interpreter that runs steps does none of that work."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import weakref
from multiprocessing import connection, reduction
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.adapter import LoraAdapter
from service.engine.adapter_reading.messages import ReadAdapter, mapped
from service.import_root import python_path

CHILD = f"{__package__}.child"
PASSED_ON = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables passed on; others may be secret."""

EXIT_WAIT_S = 2.0


class AdapterProcess:
    """Reads adapters, one at a time. It starts again if it has died.

    It returns them in memory that both share and that is used again: to map and free 84 MB for each adapter would delay
    steps.
    """

    def __init__(self, config: ModelConfig, dtype: np.dtype, max_rank: int, *, with_experts: bool = False):
        """Start the process, which takes a while to be ready. Raises OSError."""
        self._hello = (config, dtype, max_rank, with_experts)
        self._start()

    def read(self, directory: Path) -> LoraAdapter:
        """See `read_adapter`. Raises ModelError, also if the process dies twice."""
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
        self._memories: dict[int, mmap.mmap] = {}
        self._returned: list[int] = []
        self._link.send(self._hello)

    def _read(self, directory: Path) -> LoraAdapter:
        returned = [self._returned.pop() for _ in range(len(self._returned))]
        self._link.send((directory, returned))
        reply = self._link.recv()
        if isinstance(reply, ModelError):
            raise reply
        assert isinstance(reply, ReadAdapter)
        if reply.memory not in self._memories:
            self._memories[reply.memory] = mapped(reduction.recv_handle(self._link))
        memory = np.frombuffer(self._memories[reply.memory], np.uint8)
        weakref.finalize(memory, self._returned.append, reply.memory)  # once no array of the adapter is left
        return reply.placed_in(memory)


def _end(link: connection.Connection, process: subprocess.Popen[bytes]) -> None:
    link.close()  # it exits if it waits for a folder
    try:
        process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
