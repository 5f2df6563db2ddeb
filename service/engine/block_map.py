"""The pool as a picture: a byte a block, for people who look."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from service.engine.block_pool import BlockPool
from service.engine.sequence import Sequence

FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 16
"""What a byte says: nobody's, nobody's but kept, of several tables, or of one request, whose colour it is."""
MAX_CELLS = 8192


def draw_blocks(pool: BlockPool, running: Iterable[Sequence]) -> bytes:
    """One byte for each block of the pool, or for every k-th, so that there are at most MAX_CELLS."""
    picture = bytearray(pool.num_blocks)
    for block in pool.cached_blocks():
        picture[block] = CACHED
    for sequence in running:
        colour = FIRST_OWNER + crc32(sequence.request_id.encode()) % (256 - FIRST_OWNER)
        for block in sequence.block_table:
            picture[block] = SHARED if picture[block] >= SHARED else colour
    return bytes(picture[:: -(-pool.num_blocks // MAX_CELLS)])
