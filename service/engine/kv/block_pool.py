from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from zlib import crc32

_PLAIN, _RETAINED, _SAVED = range(3)
"""`_SAVED`: the other tier holds a copy too."""


class OutOfBlocks(Exception):
    """Raised before any block is allocated."""


class BlockPool:
    """Block ids of one tier: *used* (held), *cached* (contents retained) or *free*.

    When none is free, cached blocks are evicted: saved ones first, then the least recently held. Tables are released
    from the end, so prefixes are evicted from theirs.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None):
        """`on_evict` receives each evicted block and may discard others."""
        self.num_blocks = num_blocks
        self.num_shared = 0
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
        return len(self._cached[_SAVED])

    @property
    def num_available(self) -> int:
        return len(self._free) + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def is_shared(self, block: int) -> bool:
        """Return True if the block is read-only: retained or shared."""
        return self._references[block] > 1 or self._retention[block] != _PLAIN

    def is_held_by_several(self, block: int) -> bool:
        return self._references[block] > 1

    def num_holders(self, block: int) -> int:
        return self._references[block]

    def is_retained(self, block: int) -> bool:
        return self._retention[block] != _PLAIN

    def is_cached(self, block: int) -> bool:
        return self._references[block] == 0 and self._retention[block] != _PLAIN

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        references = self._references
        return [references[block] for block in blocks].count(0)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. Raises OutOfBlocks."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks requested, {self.num_available} available")
        while len(self._free) < count:
            cached = self._cached[_SAVED] or self._cached[_RETAINED]
            block, _ = cached.popitem(last=False)
            self._retention[block] = _PLAIN
            self._free.append(block)
            if self._on_evict is not None:
                self._on_evict(block)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def num_freed(self, tables: Iterable[Sequence[int]]) -> int:
        """Count the blocks held by these tables alone."""
        held = Counter(chain.from_iterable(tables))
        return sum(self._references[block] == count for block, count in held.items())

    def share(self, blocks: Iterable[int]) -> None:
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
        more = range(self.num_blocks, num_blocks)
        self._free[:0] = reversed(more)
        self._references.extend([0] * len(more))
        self._retention.extend([_PLAIN] * len(more))
        self.num_blocks += len(more)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; the last released is the first allocated."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} is released twice")
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
        """Cache the contents once unheld. `is_saved`: the other tier holds a copy too."""
        if self._references[block] == 0:
            if self._retention[block] == _PLAIN:
                raise AssertionError(f"block {block} is free and cannot be retained")
            del self._cached[self._retention[block]][block]
            self._cached[_SAVED if is_saved else _RETAINED][block] = None
        self._retention[block] = _SAVED if is_saved else _RETAINED

    def discard(self, block: int) -> None:
        if self.is_cached(block):
            del self._cached[self._retention[block]][block]
            self._free.append(block)
        self._retention[block] = _PLAIN

    def cached_blocks(self) -> Iterable[int]:
        return chain(self._cached[_SAVED], self._cached[_RETAINED])

    def oldest_unsaved(self) -> Iterable[int]:
        """Return cached blocks without a copy in the other tier, in eviction order."""
        return iter(self._cached[_RETAINED])

    def check_invariants(self, holders: Iterable[Sequence[int]]) -> None:
        held = Counter(block for table in holders for block in table)
        for block, count in enumerate(self._references):
            if held[block] != count:
                raise AssertionError(f"block {block}: {count} references, {held[block]} holders")
        unheld = {block for block, count in enumerate(self._references) if count == 0}
        if sorted([*self._free, *self._cached[_RETAINED], *self._cached[_SAVED]]) != sorted(unheld):
            raise AssertionError("the free list, the cached blocks and the reference counts disagree")
        for retention, blocks in ((_PLAIN, self._free), *self._cached.items()):
            if any(self._retention[block] != retention for block in blocks):
                raise AssertionError("a free block is retained, or a cached one is in the wrong list")
        if self.num_shared != sum(count > 1 for count in self._references):
            raise AssertionError("the count of shared blocks is wrong")


FREE, CACHED, SHARED, MOVING, FIRST_OWNER = 0, 1, 2, 3, 16
"""Bytes of an image; values from FIRST_OWNER up are request colours."""
MAX_CELLS = 131_072


def render_blocks(pool: BlockPool, held: Iterable[tuple[str, Iterable[int]]], moving: Iterable[int] = ()) -> bytes:
    """Return one byte per block, or per k-th block to stay within MAX_CELLS. `held`: (request id, blocks); `moving`:
    copy targets."""
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
