"""A group of ranks as one `Device`: all ranks do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np

from model.ops.group.arrays import GroupArray, PartialSums, Split, SplitArray, joined, on_rank
from model.ops.group.host_blocks import GroupHostBlocks
from model.ops.group.loading import HostWriter, load_group
from model.ops.group.turns import in_turn
from model.ops.interface import Array, Device, PartOps
from model.ops.packing import TableRows


class GroupDevice:
    """`Device` that returns `GroupArray`s. Shapes given and returned are a rank's."""

    def __init__(self, ranks: Sequence[PartOps]):
        self.ranks = tuple(ranks)
        self.num_ranks = len(self.ranks)
        self.name = self.ranks[0].name
        self.device_name = f"{self.num_ranks} x {self.ranks[0].device_name}"

    def upload(self, host: np.ndarray) -> Array:
        return self._each(lambda ops: ops.upload(host))

    def upload_all(
        self, hosts: Sequence[np.ndarray], into: Array | None = None, rows: TableRows | None = None
    ) -> list[Array]:
        return list(self._each(lambda ops, into, rows: ops.upload_all(hosts, into, rows), into, rows))

    def load_parallel(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        """Call `read` once for each element of a whole; each rank gets its part of a `SplitArray`."""
        load_group(self.ranks, targets, read, HostWriter)

    def release_staging(self) -> None:
        for _, ops in self._turns():
            ops.release_staging()

    def download(self, array: Array) -> np.ndarray:
        """Return the array, or the whole of a `SplitArray`. Raises RuntimeError if ranks differ in common values."""
        return whole_of(array, [ops.download(part) for ops, part in self._parts(array)])

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        fetches = [ops.download_async(on_rank(list(arrays), rank)) for rank, ops in self._turns()]

        def fetch() -> list[np.ndarray]:
            hosts = [own() for own in fetches]
            return [whole_of(array, parts) for array, *parts in zip(arrays, *hosts, strict=True)]

        return fetch

    def compile_ahead(self, work: Callable[[], None]) -> None:
        """Do nothing: there is nothing to compile."""

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        """Record nothing; the returned function runs `work`."""
        (warm_up_run or work)()
        return work

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return self._each(lambda ops: ops.empty(shape, dtype))

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return self._each(lambda ops: ops.temporary(shape, dtype))

    def scratch(self) -> AbstractContextManager[None]:
        return self._scratch()

    @contextmanager
    def _scratch(self) -> Iterator[None]:
        with ExitStack() as all_scratches:
            for ops in self.ranks:
                all_scratches.enter_context(ops.scratch())
            yield

    def host_blocks(self, kv: Array, num_blocks: int) -> GroupHostBlocks:
        """Allocate host memory on each rank for its part of the blocks."""
        return GroupHostBlocks(self.ranks, [ops.host_blocks(part, num_blocks) for ops, part in self._parts(kv)])

    def memory_bytes(self) -> tuple[int, int]:
        """Return (free, total) bytes of the rank with the least."""
        return min(ops.memory_bytes() for _, ops in self._turns())

    def synchronize(self) -> None:
        for _, ops in self._turns():
            ops.synchronize()

    def record_event(self) -> Any:
        return [ops.record_event() for _, ops in self._turns()]

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return max(ops.elapsed_s(*events) for ops, *events in zip(self.ranks, begin, end, strict=True))

    def _turns(self) -> Iterator[tuple[int, PartOps]]:
        return in_turn(self.ranks)

    def _parts(self, array: GroupArray) -> Iterator[tuple[PartOps, Array]]:
        return ((ops, array.parts[rank]) for rank, ops in self._turns())

    def _each(self, work: Callable[..., Any], *values: Any) -> Any:
        """Join the results of work(ops, own values) on all ranks."""
        return joined([work(ops, *on_rank(values, rank)) for rank, ops in self._turns()])


def upload_parts(ops: Device, whole: np.ndarray, split: Split | None) -> Array:
    """Upload `whole` to a single device, or its parts to a group's ranks; without a split, the whole to each."""
    if split is None or not isinstance(ops, GroupDevice):
        return ops.upload(whole)
    parts = [own.upload(split.part_of(whole, rank, ops.num_ranks)) for rank, own in in_turn(ops.ranks)]
    return SplitArray(tuple(parts), split)


def whole_of(array: Array, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the downloaded `parts` of `array`. Raises RuntimeError if ranks differ in common values."""
    if isinstance(array, PartialSums):
        raise TypeError("partial sums are not downloaded")
    if isinstance(array, SplitArray):
        return _assembled(array, parts)
    first = parts[0]
    for rank, part in enumerate(parts[1:], 1):
        if part.tobytes() != first.tobytes():
            raise RuntimeError(f"ranks 0 and {rank} differ in what they computed alike")
    return first


def _assembled(array: SplitArray, parts: Sequence[np.ndarray]) -> np.ndarray:
    split = array.split
    whole = np.empty(split.whole_shape(parts[0].shape), parts[0].dtype)
    before = (slice(None),) * split.axis
    for rank, part in enumerate(parts):
        for at, start, stop in split.ranges(rank, len(parts)):
            whole[(*before, slice(start, stop))] = part[(*before, slice(at, at + stop - start))]
    return whole
