"""Allocators of contiguous regions: what a KV cache needs where a sequence must lie in one piece.

Both know block ids only, as `BlockPool` does. A region that no hole is large enough for is refused, however much is
free in all: external fragmentation is what happens here, not a figure put on top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort

from service.engine.kv.block_pool import OutOfBlocks


class Regions(ABC):
    """Hands out ranges of block ids in 0..num_blocks, and counts as a `BlockPool` does."""

    num_cached = num_shared = 0

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._taken: set[range] = set()

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks in no region."""

    @property
    def num_available(self) -> int:
        return self.num_free

    @property
    def num_used(self) -> int:
        """Blocks in regions, those that only rounding put there too."""
        return self.num_blocks - self.num_free

    @abstractmethod
    def fits(self, count: int) -> bool:
        """Whether `take` would find room for `count` blocks."""

    @abstractmethod
    def take(self, count: int) -> range:
        """A region of `count` blocks, or more where the allocator rounds up. Raises OutOfBlocks for want of a hole."""

    @abstractmethod
    def give_back(self, region: range) -> None:
        """The whole region, as it was taken."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Regions and holes make up the pool, none lies on another, and no two holes could be one."""


class BestFit(Regions):
    """Cuts a region from the smallest hole that is large enough, the first of those; neighbouring holes are one."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._holes = [range(num_blocks)] if num_blocks else []

    @property
    def num_free(self) -> int:
        return sum(map(len, self._holes))

    def fits(self, count: int) -> bool:
        return any(len(hole) >= count for hole in self._holes)

    def take(self, count: int) -> range:
        holes = [hole for hole in self._holes if len(hole) >= count]
        if not holes or count < 1:
            raise OutOfBlocks(f"no hole of {count} blocks")
        hole = min(holes, key=len)
        region, rest = hole[:count], hole[count:]
        at = self._holes.index(hole)
        self._holes[at : at + 1] = [rest] if rest else []
        self._taken.add(region)
        return region

    def give_back(self, region: range) -> None:
        _expect_taken(self._taken, region)
        at = bisect_left(self._holes, region.start, key=lambda hole: hole.start)
        first, last = at, at
        if at and self._holes[at - 1].stop == region.start:
            first = at - 1
        if at < len(self._holes) and self._holes[at].start == region.stop:
            last = at + 1
        merged = [*self._holes[first:at], region, *self._holes[at:last]]
        self._holes[first:last] = [range(merged[0].start, merged[-1].stop)]

    def check_invariants(self) -> None:
        _check_tiling(self.num_blocks, self._holes, self._taken)
        for left, right in zip(self._holes, self._holes[1:], strict=False):
            if left.stop >= right.start:
                raise AssertionError(f"holes {left} and {right} are one or out of order")


class Buddy(Regions):
    """Regions of a power of two, aligned to their size: a larger hole is halved until it fits, and two free halves
    become one again. A pool of another size is a row of such holes, the largest first."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._holes: dict[int, list[int]] = {1 << order: [] for order in range(num_blocks.bit_length())}
        start = 0
        for size in sorted(self._holes, reverse=True):
            if num_blocks & size:
                self._holes[size].append(start)
                start += size

    @property
    def num_free(self) -> int:
        return sum(size * len(starts) for size, starts in self._holes.items())

    def fits(self, count: int) -> bool:
        return any(starts for size, starts in self._holes.items() if size >= count)

    def take(self, count: int) -> range:
        sizes = [size for size, starts in self._holes.items() if starts and size >= count]
        if not sizes or count < 1:
            raise OutOfBlocks(f"no hole of {count} blocks")
        size = min(sizes)
        start = self._holes[size].pop(0)
        while size >= 2 * count:
            size //= 2
            insort(self._holes[size], start + size)
        region = range(start, start + size)
        self._taken.add(region)
        return region

    def give_back(self, region: range) -> None:
        _expect_taken(self._taken, region)
        start, size = region.start, len(region)
        while (start ^ size) in self._holes.get(size, ()):
            self._holes[size].remove(start ^ size)
            start &= ~size
            size *= 2
        insort(self._holes[size], start)

    def check_invariants(self) -> None:
        holes = [range(start, start + size) for size, starts in self._holes.items() for start in starts]
        _check_tiling(self.num_blocks, holes, self._taken)
        for size, starts in self._holes.items():
            if starts != sorted(starts) or any(start % size for start in starts):
                raise AssertionError(f"holes of {size} blocks are out of order or not aligned")
            if any(start ^ size in starts for start in starts):
                raise AssertionError(f"two halves of {2 * size} blocks are both free and not one")


def _expect_taken(taken: set[range], region: range) -> None:
    if region not in taken:
        raise AssertionError(f"{region} was not taken, or is given back twice")
    taken.remove(region)


def _check_tiling(num_blocks: int, holes: list[range], taken: set[range]) -> None:
    end = 0
    for piece in sorted([*holes, *taken], key=lambda piece: piece.start):
        if piece.start != end:
            raise AssertionError(
                f"blocks {min(end, piece.start)}..{max(end, piece.start)} are in none or in two pieces"
            )
        end = piece.stop
    if end != num_blocks:
        raise AssertionError(f"the pieces end at block {end} of {num_blocks}")
