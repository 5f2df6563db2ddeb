import pytest

from model.ops.gpu.arena import ALIGNMENT_BYTES, Arena

CHUNK = 1024


class Memory:
    """Allocator of addresses far apart, so that chunks are distinguishable."""

    def __init__(self):
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        return len(self.sizes) * 1_000_000 * ALIGNMENT_BYTES


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def arena(memory) -> Arena:
    return Arena(memory, CHUNK)


def step(arena: Arena, sizes: list[int]) -> list[int]:
    with arena.scope():
        return [arena.take(size) for size in sizes]


def test_pieces_are_aligned_and_apart_even_when_they_are_empty(arena):
    first, *rest = step(arena, [257, 0, 1])
    assert first % ALIGNMENT_BYTES == 0
    assert [address - first for address in rest] == [512, 768]


def test_the_same_requests_get_the_same_addresses_once_memory_is_there(arena, memory):
    sizes = [300, 900, 5000, 10, 700, 1024]
    first = step(arena, sizes)
    assert len(set(first)) == len(sizes)
    grown = list(memory.sizes)
    assert step(arena, sizes) == first
    assert memory.sizes == grown


def test_a_request_larger_than_a_chunk_gets_one_of_its_own(arena, memory):
    step(arena, [10, 5000, 10])
    assert memory.sizes == [CHUNK, 5120, CHUNK]


def test_an_inner_scope_gives_back_only_its_own(arena):
    with arena.scope():
        kept = arena.take(100)
        with arena.scope():
            inner = arena.take(100)
        again = arena.take(100)
        assert again == inner != kept
    assert step(arena, [100]) == [kept]


def test_growth_in_an_inner_scope_moves_nothing_and_is_used_again(arena, memory):
    with arena.scope():
        kept = arena.take(800)
        for _ in range(3):
            with arena.scope():
                assert abs(arena.take(800) - kept) >= CHUNK
    assert memory.sizes == [CHUNK, CHUNK]


def test_a_scope_ends_when_it_is_left_by_an_error(arena):
    with pytest.raises(ZeroDivisionError), arena.scope():
        arena.take(CHUNK // 0)
    assert not arena.is_open
    assert step(arena, [1]) == step(arena, [1])


def test_it_is_open_within_any_scope(arena):
    assert not arena.is_open
    with arena.scope():
        with arena.scope():
            assert arena.is_open
        assert arena.is_open
    assert not arena.is_open
