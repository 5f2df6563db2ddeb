"""Block ids and reference counts, and the pool as a picture."""

from __future__ import annotations

import pytest

from service.engine.kv.block_pool import (
    CACHED,
    FIRST_OWNER,
    FREE,
    MAX_CELLS,
    MOVING,
    SHARED,
    BlockPool,
    OutOfBlocks,
    render_blocks,
)


def test_blocks_are_taken_shared_and_given_back():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.share(first[:2])
    pool.check_invariants([first, first[:2]])
    pool.release(first)
    assert pool.num_free == 2
    pool.release(first[:2])
    pool.check_invariants([])
    assert pool.num_free == 4


def test_asking_for_too_many_takes_none():
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert pool.num_free == 2


def test_the_last_given_back_is_the_first_taken():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == blocks


def test_wrong_books_are_found():
    pool = BlockPool(3)
    taken = pool.allocate(1)
    with pytest.raises(AssertionError, match="references"):
        pool.check_invariants([])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([*taken, *taken])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(taken)


def test_kept_blocks_are_cached_and_given_away_saved_ones_first():
    lost = []
    pool = BlockPool(6, lost.append)
    first, second = pool.allocate(3), pool.allocate(2)
    for block in (*first, *second):
        pool.retain(block)
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_cached, pool.num_saved, pool.num_used) == (1, 5, 0, 0)
    pool.check_invariants([])
    pool.share(first[:1])
    assert list(pool.oldest_unsaved()) == [first[2], first[1], second[1], second[0]]
    pool.retain(second[1], is_saved=True)
    pool.allocate(3)
    assert lost == [second[1], first[2]]
    assert pool.num_available == 2
    pool.discard(second[0])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.release(first[:1])
    assert list(pool.oldest_unsaved()) == [first[1], first[0]]


def test_a_pool_grows():
    pool = BlockPool(0)
    pool.grow(3)
    held = pool.allocate(2)
    pool.grow(5)
    pool.grow(4)
    assert (pool.num_blocks, pool.num_free) == (5, 3)
    pool.check_invariants([held])


def test_every_block_shows_whose_it_is():
    pool = BlockPool(8)
    first, second, third, kept = pool.allocate(4)
    pool.retain(kept)
    pool.share([second])
    pool.release([kept])
    picture = render_blocks(pool, [("a", [first, second]), ("b", [second, third])])
    assert len(picture) == 8
    assert picture[second] == SHARED
    assert picture[kept] == CACHED
    assert picture[first] >= FIRST_OWNER <= picture[third]
    assert picture[first] != picture[third]
    assert sorted(picture).count(FREE) == 4


def test_what_copies_fill_shows_until_something_counts_on_it():
    pool = BlockPool(4)
    swapped, saved = pool.allocate(2)
    picture = render_blocks(pool, [("a", [swapped])], moving=[swapped, saved])
    assert picture[swapped] >= FIRST_OWNER
    assert picture[saved] == MOVING
    assert picture.count(FREE) == 2


def test_an_empty_pool_is_an_empty_picture():
    assert render_blocks(BlockPool(0), []) == b""


def test_a_large_pool_is_drawn_in_few_cells():
    assert len(render_blocks(BlockPool(MAX_CELLS), [])) == MAX_CELLS
    assert len(render_blocks(BlockPool(MAX_CELLS + 1), [])) == MAX_CELLS // 2 + 1
