"""The picture of the pool."""

from __future__ import annotations

from service.engine.block_map import CACHED, FIRST_OWNER, FREE, MAX_CELLS, SHARED, draw_blocks
from service.engine.block_pool import BlockPool


class Holder:
    def __init__(self, request_id, block_table):
        self.request_id = request_id
        self.block_table = block_table


def test_every_block_shows_whose_it_is():
    pool = BlockPool(8)
    first, second, third, kept = pool.take(4)
    pool.keep(kept)
    pool.share([second])
    pool.give_back([kept])
    picture = draw_blocks(pool, [Holder("a", [first, second]), Holder("b", [second, third])])
    assert len(picture) == 8
    assert picture[second] == SHARED
    assert picture[kept] == CACHED
    assert picture[first] >= FIRST_OWNER <= picture[third]
    assert picture[first] != picture[third]
    assert sorted(picture).count(FREE) == 4


def test_a_large_pool_is_drawn_in_few_cells():
    assert len(draw_blocks(BlockPool(MAX_CELLS), [])) == MAX_CELLS
    assert len(draw_blocks(BlockPool(MAX_CELLS + 1), [])) == MAX_CELLS // 2 + 1
