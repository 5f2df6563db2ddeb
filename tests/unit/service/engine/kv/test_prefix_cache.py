"""The tree of what is known by its tokens, and sequences that begin with what is in it."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.sampling_params import SamplingParams
from service.engine.kv.kv_manager import KVManager
from service.engine.kv.prefix_tree import ROOTS_BETWEEN_SWEEPS, PrefixTree, num_common_tokens, pack_tokens
from service.engine.request import EngineRequest
from service.engine.sequence import SequenceGroup, SequenceStatus
from service.engine.step import Chunk, FinishedTransfer

SIZE = 4
tokens = st.lists(st.sampled_from([0, 1, 255, 256, 65535, 1 << 31]), max_size=14)


def sequence(token_ids, salt=""):
    params = SamplingParams(max_tokens=100)
    request = EngineRequest(request_id="s", prompt=tuple(token_ids), sampling=params, cache_salt=salt)
    made = SequenceGroup(request, frozenset()).branches[0]
    made.set_status(SequenceStatus.RUNNING)
    return made


def begun(kv, token_ids, salt=""):
    """A sequence as admission begins it: with its blocks, all its tokens planned to be computed."""
    made = sequence(token_ids, salt)
    kv.attach(made, kv.match(made))
    return made


def planned(kv, made):
    start = made.num_computed_tokens
    kv.extend(made, made.num_tokens)
    kv.cache_blocks(made, made.num_tokens)
    made.num_computed_tokens = made.num_tokens
    return Chunk(made, start, made.num_tokens - start, (made,))


def computed(kv, token_ids, salt=""):
    """A sequence whose tokens have been computed by a step of their own."""
    kv.start_step()
    made = begun(kv, token_ids, salt)
    kv.commit_step([planned(kv, made)], set())
    kv.start_step()
    return made


def caching(num_blocks=32):
    return KVManager(num_blocks, SIZE, prefix_caching=True)


@given(tokens, tokens)
def test_tokens_in_common(left, right):
    expected = next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert num_common_tokens(pack_tokens(left), pack_tokens(right)) == expected


@given(st.lists(st.tuples(*[st.integers(0, 3)] * SIZE), max_size=30), st.tuples(*[st.integers(0, 3)] * SIZE))
def test_the_closest_child_has_the_most_tokens_in_common(children, wanted):
    tree = PrefixTree(SIZE)
    root = tree.root("")
    for child in set(children):
        tree.add(root, pack_tokens(child)).gpu = 0
    tree.check_invariants()
    found, closest = tree.find("", pack_tokens(wanted[:3]))
    most = max((num_common_tokens(pack_tokens(child), pack_tokens(wanted[:3])) for child in children), default=0)
    assert found == []
    assert (closest[1] if closest else 0) == most
    assert closest is None or num_common_tokens(closest[0].tokens, pack_tokens(wanted[:3])) == most


def test_salts_that_keep_nothing_are_forgotten():
    tree = PrefixTree(SIZE)
    kept = tree.add(tree.root("kept"), pack_tokens(range(4)))
    for number in range(2 * ROOTS_BETWEEN_SWEEPS):
        tree.root(str(number))
    assert len(tree._roots) < ROOTS_BETWEEN_SWEEPS
    assert tree.find("kept", pack_tokens(range(4)))[0] == [kept]


def test_a_prompt_begins_with_the_blocks_of_one_before_it():
    kv = caching()
    first = computed(kv, range(10))
    second = begun(kv, [*range(8), 50, 51, 52])
    assert list(second.block_table) == list(first.block_table)[:2]
    assert (second.num_computed_tokens, second.group.num_cached_tokens) == (8, 8)
    assert (kv.num_query_tokens, kv.num_hit_tokens) == (10 + 11, 8)
    assert kv.pool.num_shared == 2
    kv.check_invariants([first, second])


def test_the_last_token_is_always_left_to_compute():
    kv = caching()
    computed(kv, range(8))
    again = begun(kv, range(8))
    assert again.num_computed_tokens == 7
    chunk = planned(kv, again)
    assert (chunk.start, chunk.length) == (7, 1)
    assert len(kv.drain_copies()) == 1


def test_hits_end_in_the_middle_of_a_block_and_the_first_write_copies_it():
    kv = caching()
    first = computed(kv, range(8))
    other = begun(kv, [0, 1, 2, 3, 4, 5, 60, 61])
    assert other.num_computed_tokens == 6
    assert other.block_table == first.block_table
    planned(kv, other)
    ((source, target),) = kv.drain_copies()
    assert (source, target) == (first.block_table[1], other.block_table[1])
    assert kv.match(sequence([*range(8), 9])).num_tokens == 8
    assert kv.match(sequence([0, 1, 2, 3, 4, 5, 60, 61, 9])).num_tokens == 8
    kv.check_invariants([first, other])


def test_what_a_step_is_about_to_write_is_shared_in_whole_blocks_only():
    kv = caching()
    kv.start_step()
    first = begun(kv, range(8))
    planned(kv, first)
    second = begun(kv, [0, 1, 2, 3, 4, 5, 60])
    assert (second.num_computed_tokens, list(second.block_table)) == (4, [first.block_table[0]])


def test_generated_blocks_are_found_in_the_next_turn():
    kv = caching()
    first = computed(kv, range(6))
    for token in (70, 71, 72, 73):
        first.token_ids.append(token)
        kv.start_step()
        kv.extend(first, first.num_tokens)
        first.num_computed_tokens = first.num_tokens
        kv.commit_step([Chunk(first, first.num_tokens - 1, 1, (first,))], set())
    kv.release(first)
    turn = [*range(6), 70, 71, 72, 73, 20, 21]
    assert kv.match(sequence(turn)).num_tokens == 8
    assert kv.pool.num_cached == 2
    assert kv.pool.num_used == 0


def test_no_salt_sees_what_another_has():
    kv = caching()
    computed(kv, range(10), "one")
    assert kv.match(sequence(range(10), "other")).num_tokens == 0
    assert kv.match(sequence(range(10), "one")).num_tokens == 8


def test_the_same_tokens_computed_twice_are_held_once_when_both_are_done():
    kv = caching()
    kv.start_step()
    one, other = begun(kv, range(9)), begun(kv, range(9))
    chunks = [planned(kv, one), planned(kv, other)]
    assert one.block_table[0] != other.block_table[0]
    kv.commit_step(chunks, set())
    assert one.block_table[:2] == other.block_table[:2]
    assert one.block_table[2] != other.block_table[2]
    assert kv.pool.num_used == 4
    kv.check_invariants([one, other])


def test_old_blocks_are_given_away_from_the_end_of_a_prefix():
    kv = caching(num_blocks=6)
    for start in (0, 20):
        kv.release(computed(kv, range(start, start + 12)))
    assert (kv.pool.num_free, kv.pool.num_cached) == (0, 6)
    kv.release(begun(kv, range(4)))  # uses the first block of the older one once more
    other = sequence(range(90, 102))
    kv.attach(other, kv.match(other))
    kv.extend(other, 8)
    assert kv.match(sequence(range(13))).num_tokens == 4
    assert kv.match(sequence(range(20, 33))).num_tokens == 12
    kv.extend(other, 12)
    assert kv.match(sequence(range(20, 33))).num_tokens == 8
    kv.check_invariants([other])


def test_wanted_blocks_count_the_cached_ones_that_come_into_use():
    kv = caching(num_blocks=8)
    first = computed(kv, range(12))
    again = sequence(range(14))
    assert kv.num_blocks_for_match(again, kv.match(again)) == 1
    kv.release(first)
    assert kv.num_blocks_for_match(again, kv.match(again)) == 4
    before = kv.pool.num_available
    kv.attach(again, kv.match(again))
    kv.extend(again, 14)
    assert before - kv.pool.num_available == 4


def test_the_copy_of_a_beginning_is_not_wanted_where_there_is_no_room_for_it():
    kv = caching(num_blocks=3)
    kv.release(computed(kv, range(8)))
    other = sequence([0, 1, 2, 3, 4, 5, *range(60, 66)])
    assert kv.num_blocks_for_match(other, kv.match(other)) == 4
    match = kv.match_within_blocks(other, kv.pool.num_available)
    assert (match.num_tokens, kv.num_blocks_for_match(other, match)) == (4, 3)
    assert kv.match_within_blocks(other, 4) == kv.match(other)
    kv.attach(other, match)
    planned(kv, other)
    kv.check_invariants([other])


def test_nan_is_not_remembered_and_takes_nothing_proven_along():
    kv = caching()
    good = computed(kv, range(5))
    kv.start_step()
    bad = begun(kv, range(12))
    shares = begun(kv, [*range(12), 13]) if planned(kv, bad) else None
    assert shares.num_computed_tokens == 12
    chunk = Chunk(bad, 4, 8, (bad,))
    kv.commit_step([chunk, planned(kv, shares)], {bad, shares})
    assert kv.match(sequence([*range(12), 13])).num_tokens == 4
    for one in (good, bad, shares):
        kv.check_invariants([each for each in (good, bad, shares) if each.block_table])
        kv.release(one)
    assert (kv.pool.num_used, kv.pool.num_cached) == (0, 1)


def test_who_shares_what_nan_took_along_does_not_seek_it_on_the_host():
    kv = KVManager(32, SIZE, prefix_caching=True, swapping=True)
    kv.host.pool.grow(8)
    good = computed(kv, range(5))
    bad, shares = begun(kv, range(12)), sequence([*range(12), 13])
    kv.commit_step([planned(kv, bad)._replace(sampled_sequences=())], set())
    kv.start_step()
    kv.attach(shares, kv.match(shares))
    kv.save_to_host(shares)
    outs, _ = kv.drain_swaps()
    kv.complete_transfer(FinishedTransfer(is_out=True, num_blocks=len(outs), seconds=1e-3))
    assert kv.host.pool.num_cached == len(shares.block_table) == 3
    kv.commit_step([Chunk(bad, 4, 8, (bad,))], {bad})
    kv.release(bad)
    kv.swap_out(shares)
    assert (kv.host.pool.num_used, kv.host.pool.num_cached) == (1, 0)
    kv.check_invariants([good])


def test_a_fork_starts_at_its_parents_position():
    kv = caching()
    parent = computed(kv, range(10))
    child = sequence(range(10))
    kv.fork(parent, child, 6)
    kv.check_invariants([parent, child])
    child.token_ids[6:] = array("I", [80, 81])
    planned(kv, child)
    assert kv.match(sequence([*range(6), 80, 81, 9])).num_tokens == 8
    kv.check_invariants([parent, child])


@pytest.mark.parametrize("seed", range(5))
def test_random_prefixes_keep_the_books(seed):
    random.seed(seed)
    kv, alive = caching(num_blocks=40), []
    for _ in range(400):
        kv.start_step()
        if alive and (random.random() < 0.4 or kv.pool.num_available < 8):
            kv.release(alive.pop(random.randrange(len(alive))))
        else:
            prompt = [random.randrange(2) for _ in range(random.randrange(1, 20))]
            made = begun(kv, prompt, random.choice("ab"))
            kv.commit_step([planned(kv, made)], {made} if random.random() < 0.1 else set())
            alive.append(made)
        kv.drain_copies()
        kv.check_invariants(alive)
    for one in alive:
        kv.release(one)
    assert kv.pool.num_used == 0
    assert kv.num_hit_tokens > 0
