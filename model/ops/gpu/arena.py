"""Memory for the temporaries of a step: handed out by moving a mark, taken back by moving it back.

The same sequence of requests gets the same addresses every time, which a captured CUDA graph relies on. All work that
touches the arena runs on one stream, so memory can be handed out again before the work that used it has run.
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
    """Grows chunk by chunk; a chunk never moves and is never given back."""

    def __init__(self, allocate: Callable[[int], Any], chunk_bytes: int):
        """`allocate(num_bytes)` returns a pointer that can be added to, aligned to at least ALIGNMENT_BYTES."""
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._chunks: list[tuple[Any, int]] = []  # pointer, size in bytes
        self._next = _Mark(0, 0)
        self._depth = 0

    @property
    def is_open(self) -> bool:
        """Whether a scope is open: outside of one nothing says when memory may be taken back."""
        return self._depth > 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Takes back at its end everything handed out within it. Scopes nest."""
        mark = self._next
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._next = mark

    def take(self, num_bytes: int) -> Any:
        """A pointer to `num_bytes` of undefined contents, good until the innermost open scope ends."""
        size = -(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        chunk, offset = self._next
        while chunk < len(self._chunks) and offset + size > self._chunks[chunk][1]:
            chunk, offset = chunk + 1, 0
        if chunk == len(self._chunks):
            size_of_chunk = max(size, self._chunk_bytes)
            self._chunks.append((self._allocate(size_of_chunk), size_of_chunk))
        self._next = _Mark(chunk, offset + size)
        return self._chunks[chunk][0] + offset
