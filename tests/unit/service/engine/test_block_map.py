"""The picture of the pool."""

from __future__ import annotations

from service.engine.block_map import CACHED, FIRST_OWNER, FREE, MAX_CELLS, MOVING, SHARED, draw_blocks
from service.engine.block_pool import BlockPool


def test_every_block_shows_whose_it_is():
    pool = BlockPool(8)
    first, second, third, kept = pool.take(4)
    pool.keep(kept)
    pool.share([second])
    pool.give_back([kept])
    picture = draw_blocks(pool, [("a", [first, second]), ("b", [second, third])])
    assert len(picture) == 8
    assert picture[second] == SHARED
    assert picture[kept] == CACHED
    assert picture[first] >= FIRST_OWNER <= picture[third]
    assert picture[first] != picture[third]
    assert sorted(picture).count(FREE) == 4


def test_what_copies_fill_shows_until_somebody_counts_on_it():
    pool = BlockPool(4)
    swapped, saved = pool.take(2)
    picture = draw_blocks(pool, [("a", [swapped])], moving=[swapped, saved])
    assert picture[swapped] >= FIRST_OWNER
    assert picture[saved] == MOVING
    assert picture.count(FREE) == 2


def test_an_empty_pool_is_an_empty_picture():
    assert draw_blocks(BlockPool(0), []) == b""


def test_a_large_pool_is_drawn_in_few_cells():
    assert len(draw_blocks(BlockPool(MAX_CELLS), [])) == MAX_CELLS
    assert len(draw_blocks(BlockPool(MAX_CELLS + 1), [])) == MAX_CELLS // 2 + 1
