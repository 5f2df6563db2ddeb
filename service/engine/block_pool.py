"""Block ids and their reference counts: which blocks of a memory are free, and how many tables hold the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than asked for; nothing was taken."""


class BlockPool:
    """Knows ids only; the memory behind them belongs to the executor. One instance per memory."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds the block."""
        return self._references[block] > 1

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference. Raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks, which somebody holds already."""
        for block in blocks:
            if self._references[block] == 0:
                raise AssertionError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less for each; a block nobody holds is free again, the last given back the first taken."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise AssertionError(f"block {block} is given back twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_invariants(self, holders: Iterable[Sequence[int]]) -> None:
        """Free and used make the total, and every reference count equals the number of tables that hold the block."""
        held = Counter(block for table in holders for block in table)
        for block, count in enumerate(self._references):
            if held[block] != count:
                raise AssertionError(f"block {block}: {count} references, {held[block]} holders")
        if sorted(self._free) != [block for block, count in enumerate(self._references) if count == 0]:
            raise AssertionError("the free list and the reference counts disagree")
