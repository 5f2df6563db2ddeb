"""Large arrays filled from the host in pieces, by several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from model.ops.interface import Array

PIECE_BYTES = 4 << 20
"""With half as much the threads wait for the interpreter, and what is read lies in no cache when it is copied on with
twice as much: 52 GB/s by 12 threads, 32 of 2 MiB and 38 of 8 MiB by 8."""

MAX_THREADS = 12
"""What it takes to keep the bus of an H200 busy: 8 of them read 48 GB/s, 12 read 68 of which the bus carries 52."""


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of the flattened array `target`."""

    target: int
    start: int
    stop: int


def load_in_threads(targets: Sequence[Array], work: Callable[[Iterator[Piece]], None]) -> None:
    """Run `work` in one thread a core; the iterators they get share out all pieces of `targets`.

    Raises what a `work` raised; the others get no further pieces then.
    """
    pieces = deque(_pieces_of(targets))

    def work_or_stop_all() -> None:
        try:
            work(_taken(pieces))
        except BaseException:
            pieces.clear()
            raise

    num_threads = min(MAX_THREADS, len(pieces), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(1, num_threads), "fill") as threads:
        try:
            for done in [threads.submit(work_or_stop_all) for _ in range(num_threads)]:
                done.result()
        finally:
            pieces.clear()


def _pieces_of(targets: Sequence[Array]) -> Iterator[Piece]:
    for index, target in enumerate(targets):
        step = PIECE_BYTES // target.dtype.itemsize
        for start in range(0, target.size, step):
            yield Piece(index, start, min(start + step, target.size))


def _taken(pieces: deque[Piece]) -> Iterator[Piece]:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:  # asking for the length first would race with the other threads
            return
        yield piece
