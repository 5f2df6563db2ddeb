"""A pool as a picture: a byte a block, for people who look."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from service.engine.block_pool import BlockPool

FREE, CACHED, SHARED, MOVING, FIRST_OWNER = 0, 1, 2, 3, 16
"""What a byte says: nobody's, nobody's but kept, of several holders, about to be kept, or of one request, whose colour
it is."""
MAX_CELLS = 8192


def draw_blocks(pool: BlockPool, held: Iterable[tuple[str, Iterable[int]]], moving: Iterable[int] = ()) -> bytes:
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
