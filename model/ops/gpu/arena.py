"""Bump allocator for the temporaries of a step.

Equal requests get equal addresses, as captured graphs require. All work runs on one stream, so memory may be reused
before its last user has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

ALIGNMENT_BYTES = 256


class _Mark(NamedTuple):
    chunk: int
    offset: int


class Arena:
    """Chunks of memory that are never moved or freed."""

    def __init__(self, allocate: Callable[[int], Any], chunk_bytes: int):
        """`allocate(num_bytes)` returns a pointer aligned to ALIGNMENT_BYTES."""
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._chunks: list[tuple[Any, int]] = []  # pointer, size in bytes
        self._next = _Mark(0, 0)
        self._depth = 0

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free memory on exit. Scopes nest."""
        mark = self._next
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._next = mark

    def take(self, num_bytes: int) -> Any:
        """Return a pointer to undefined memory, valid until the innermost scope ends."""
        size = -(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        chunk, offset = self._next
        while chunk < len(self._chunks) and offset + size > self._chunks[chunk][1]:
            chunk, offset = chunk + 1, 0
        if chunk == len(self._chunks):
            size_of_chunk = max(size, self._chunk_bytes)
            self._chunks.append((self._allocate(size_of_chunk), size_of_chunk))
        self._next = _Mark(chunk, offset + size)
        return self._chunks[chunk][0] + offset
