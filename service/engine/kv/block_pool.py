"""Block ids and their reference counts: which blocks of a memory are free, held, or kept for what they contain."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from zlib import crc32

_PLAIN, _RETAINED, _SAVED = range(3)
"""What a block's contents are worth: nothing, keeping, or keeping and saved elsewhere."""


class OutOfBlocks(Exception):
    """The pool has fewer blocks to give than asked for; nothing was taken."""


class BlockPool:
    """Knows ids only; the memory behind them belongs to the executor. One instance per memory.

    A block is *used* while somebody holds it. One that nobody holds is *cached* if it is kept for its contents, else
    *free*. Cached blocks are given away too, once no free ones are left: those whose contents are saved elsewhere
    first, and of either kind the one that nobody has held for longest. Since tables are given back from their ends,
    the end of a prefix goes before its beginning.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None):
        """`on_evict` is told of each cached block that is taken from the cache; it may forget others in turn."""
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks with more than one holder
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._retention = bytearray([_PLAIN]) * num_blocks
        self._cached: dict[int, OrderedDict[int, None]] = {_SAVED: OrderedDict(), _RETAINED: OrderedDict()}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached[_RETAINED]) + len(self._cached[_SAVED])

    @property
    def num_saved(self) -> int:
        """Cached blocks whose contents are saved elsewhere too."""
        return len(self._cached[_SAVED])

    @property
    def num_available(self) -> int:
        """What `take` can give: free and cached."""
        return len(self._free) + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def is_shared(self, block: int) -> bool:
        """Whether the block must not be written to: more than one holds it, or it is kept for what it contains."""
        return self._references[block] > 1 or self._retention[block] != _PLAIN

    def is_held_by_several(self, block: int) -> bool:
        """Whether the block has more than one holder."""
        return self._references[block] > 1

    def num_holders(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept and nobody holds it."""
        return self._references[block] == 0 and self._retention[block] != _PLAIN

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one reference: free ones, then cached ones. Raises OutOfBlocks."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} to be had")
        while len(self._free) < count:
            cached = self._cached[_SAVED] or self._cached[_RETAINED]
            block, _ = cached.popitem(last=False)
            self._retention[block] = _PLAIN
            self._free.append(block)
            self._on_evict(block)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def num_freed(self, tables: Iterable[Sequence[int]]) -> int:
        """Blocks that nobody else holds than whoever holds these tables: available once all of them are given back."""
        held = Counter(chain.from_iterable(tables))
        return sum(self._references[block] == count for block, count in held.items())

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks, which are held or cached already."""
        for block in blocks:
            count = self._references[block]
            if count == 0:
                if self._retention[block] == _PLAIN:
                    raise AssertionError(f"block {block} is free and cannot be shared")
                del self._cached[self._retention[block]][block]
            elif count == 1:
                self.num_shared += 1
            self._references[block] = count + 1

    def grow(self, num_blocks: int) -> None:
        """There is memory for so many blocks now; it never gets less."""
        more = range(self.num_blocks, num_blocks)
        self._free[:0] = reversed(more)
        self._references.extend([0] * len(more))
        self._retention.extend([_PLAIN] * len(more))
        self.num_blocks += len(more)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each of the blocks, which stand behind what they continue.

        A block that nobody holds any more is cached or free; of free ones the last given back is the first taken.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} is given back twice")
            self._references[block] = count
            if count == 1:
                self.num_shared -= 1
            elif count == 0:
                retention = self._retention[block]
                if retention == _PLAIN:
                    self._free.append(block)
                else:
                    self._cached[retention][block] = None

    def retain(self, block: int, *, is_saved: bool = False) -> None:
        """What this block contains is worth keeping once nobody holds it; whether it is saved elsewhere too."""
        if self._references[block] == 0:
            if self._retention[block] == _PLAIN:
                raise AssertionError(f"block {block} is free and cannot be kept")
            del self._cached[self._retention[block]][block]
            self._cached[_SAVED if is_saved else _RETAINED][block] = None
        self._retention[block] = _SAVED if is_saved else _RETAINED

    def discard(self, block: int) -> None:
        """What the block contains is no longer worth keeping."""
        if self.is_cached(block):
            del self._cached[self._retention[block]][block]
            self._free.append(block)
        self._retention[block] = _PLAIN

    def cached_blocks(self) -> Iterable[int]:
        """Those that nobody holds and that are kept."""
        return chain(self._cached[_SAVED], self._cached[_RETAINED])

    def oldest_unsaved(self) -> Iterable[int]:
        """The cached blocks that are saved nowhere else, the next to be given away first."""
        return iter(self._cached[_RETAINED])

    def check_invariants(self, holders: Iterable[Sequence[int]]) -> None:
        """Free, used and cached make the total, and every reference count equals the number of the block's holders."""
        held = Counter(block for table in holders for block in table)
        for block, count in enumerate(self._references):
            if held[block] != count:
                raise AssertionError(f"block {block}: {count} references, {held[block]} holders")
        unheld = {block for block, count in enumerate(self._references) if count == 0}
        if sorted([*self._free, *self._cached[_RETAINED], *self._cached[_SAVED]]) != sorted(unheld):
            raise AssertionError("the free list, the cached blocks and the reference counts disagree")
        for retention, blocks in ((_PLAIN, self._free), *self._cached.items()):
            if any(self._retention[block] != retention for block in blocks):
                raise AssertionError("a free block is kept, or a cached one is among the wrong ones")
        if self.num_shared != sum(count > 1 for count in self._references):
            raise AssertionError("the count of shared blocks is wrong")


FREE, CACHED, SHARED, MOVING, FIRST_OWNER = 0, 1, 2, 3, 16
"""What a byte says: nobody's, nobody's but kept, of several holders, about to be kept, or of one request, whose colour
it is."""
MAX_CELLS = 8192


def render_blocks(pool: BlockPool, held: Iterable[tuple[str, Iterable[int]]], moving: Iterable[int] = ()) -> bytes:
    """One byte for each block of the pool, or for every k-th, so that there are at most MAX_CELLS.

    `held` are request ids and blocks that they hold, `moving` the blocks that copies under way fill.
    """
    picture = bytearray(pool.num_blocks)
    for block in moving:
        picture[block] = MOVING
    for block in pool.cached_blocks():
        picture[block] = CACHED
    for request_id, blocks in held:
        colour = FIRST_OWNER + crc32(request_id.encode()) % (256 - FIRST_OWNER)
        for block in blocks:
            picture[block] = SHARED if picture[block] == SHARED or picture[block] >= FIRST_OWNER else colour
    return bytes(picture[:: max(1, -(-pool.num_blocks // MAX_CELLS))])
