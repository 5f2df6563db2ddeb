"""Memories shared between the engine and the processes that read adapters."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from service.observability.logs import fields

log = logging.getLogger("quire.engine")

Pin = Callable[[np.ndarray], Callable[[], None]]
"""`AdapterOps.pin`."""


class SharedMemories:
    """Reusable memories of `num_bytes`: mapping and freeing one per adapter would delay steps.

    One is made ahead. Another thread pins memories, slowly, so one may be taken before it is pinned.
    """

    def __init__(self, num_bytes: int, pin: Pin | None = None):
        self._num_bytes = num_bytes
        self._pin = pin
        self._maps: list[mmap.mmap] = []
        self.descriptors: list[int] = []
        self._free: SimpleQueue[int | OSError] = SimpleQueue()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="adapter memories")
        self._pinner = ThreadPoolExecutor(1, thread_name_prefix="pin adapter memories")
        self._maker.submit(self._make)

    def take(self) -> int:
        """Return the number of a free memory, waiting for one. Raises OSError if none can be made."""
        number = self._free.get()
        if self._free.empty():
            self._maker.submit(self._make)
        if isinstance(number, OSError):
            raise number
        return number

    def array(self, number: int) -> np.ndarray:
        """Return a taken memory, uint8[num_bytes]. It is free again once the array and all its views are gone."""
        array = np.frombuffer(self._maps[number], np.uint8)
        weakref.finalize(array, self._free.put, number)
        return array

    def give_back(self, number: int) -> None:
        """Free a taken memory that has no array."""
        self._free.put(number)

    def _make(self) -> None:
        try:
            number = self._add()
        except OSError as error:
            self._free.put(error)
            return
        self._free.put(number)
        if self._pin is not None:
            self._pinner.submit(_pin, self._pin, self._maps[number])

    def _add(self) -> int:
        descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC)
        close = weakref.finalize(self, os.close, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, self._num_bytes)  # allocate all pages at once
            self._maps.append(mmap.mmap(descriptor, self._num_bytes))
        except OSError:
            close()
            raise
        self.descriptors.append(descriptor)
        return len(self._maps) - 1


def _pin(pin: Pin, memory: mmap.mmap) -> None:
    try:
        unpin = weakref.finalize(memory, pin(np.frombuffer(memory, np.uint8)))
        unpin.atexit = False  # the driver has ended by then
    except RuntimeError as error:
        log.warning("memory of adapters is not pinned %s", fields(error=error))
