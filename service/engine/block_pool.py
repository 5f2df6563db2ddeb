"""Block ids and their reference counts: which blocks of a memory are free, held, or kept for what they contain."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class OutOfBlocks(Exception):
    """The pool has fewer blocks to give than asked for; nothing was taken."""


class BlockPool:
    """Knows ids only; the memory behind them belongs to the executor. One instance per memory.

    A block is *used* while somebody holds it. One that nobody holds is *cached* if it is kept for its contents, else
    *free*. Cached blocks are given away too, once no free ones are left, first the one that nobody has held for
    longest. Since tables are given back from their ends, the end of a prefix goes before its beginning.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None):
        """`on_evict` is told of each cached block that is taken from the cache; it may forget others in turn."""
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks with more than one holder
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """What `take` can give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def is_shared(self, block: int) -> bool:
        """Whether the block must not be written to: more than one holds it, or it is kept for what it contains."""
        return self._references[block] > 1 or self._is_kept[block] == 1

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept and nobody holds it."""
        return block in self._cached

    def take(self, count: int) -> list[int]:
        """`count` blocks, each with one reference: free ones, then the oldest cached ones. Raises OutOfBlocks."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} to be had")
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            self._is_kept[block] = 0
            self._free.append(block)
            self._on_evict(block)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks, which are held or cached already."""
        for block in blocks:
            count = self._references[block]
            if count == 0:
                if block not in self._cached:
                    raise AssertionError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            elif count == 1:
                self.num_shared += 1
            self._references[block] = count + 1

    def give_back(self, blocks: Sequence[int], *, first_to_go: bool = False) -> None:
        """One holder less for each, the last one first.

        A block nobody holds is cached if it is kept, as the last to be given away or the first; else it is free, and
        the last given back is the first taken.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} is given back twice")
            self._references[block] = count
            if count == 1:
                self.num_shared -= 1
            elif count == 0:
                if self._is_kept[block]:
                    self._cached[block] = None
                    if first_to_go:
                        self._cached.move_to_end(block, last=False)
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """What this held block contains is worth keeping once nobody holds it."""
        if self._references[block] == 0:
            raise AssertionError(f"block {block} is not held and cannot be kept")
        self._is_kept[block] = 1

    def forget(self, block: int) -> None:
        """What the block contains is no longer worth keeping."""
        self._is_kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def oldest_cached(self) -> Iterable[int]:
        """The cached blocks, the next to be given away first."""
        return iter(self._cached)

    def check_invariants(self, holders: Iterable[Sequence[int]]) -> None:
        """Free, used and cached make the total, and every reference count equals the number of the block's holders."""
        held = Counter(block for table in holders for block in table)
        for block, count in enumerate(self._references):
            if held[block] != count:
                raise AssertionError(f"block {block}: {count} references, {held[block]} holders")
        unheld = {block for block, count in enumerate(self._references) if count == 0}
        if sorted([*self._free, *self._cached]) != sorted(unheld):
            raise AssertionError("the free list, the cached blocks and the reference counts disagree")
        if any(self._is_kept[block] for block in self._free) or not all(self._is_kept[block] for block in self._cached):
            raise AssertionError("a free block is kept, or a cached one is not")
        if self.num_shared != sum(count > 1 for count in self._references):
            raise AssertionError("the count of shared blocks is wrong")
