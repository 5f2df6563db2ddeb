import random
from array import array

import pytest

from service.engine.drafting.past_outputs import (
    KEY_TOKENS,
    MAX_CANDIDATES,
    MAX_VOTERS,
    PastOutputs,
    likeliest,
    num_matching,
)


def packed(tokens):
    return array("I", tokens).tobytes()


def past(*outputs):
    made = PastOutputs()
    for output in outputs:
        made.add(array("I", output))
    return made


def searched(outputs, recent, shortest):
    """Compare with every place: (depth, the tokens after each of the longest matches, the latest first)."""
    places = [(output, end) for output in outputs for end in range(KEY_TOKENS, len(output))][::-1]
    places = [place for place in places if place[0][place[1] - KEY_TOKENS : place[1]] == recent[-KEY_TOKENS:]]
    depths = [(equal_last(recent, output[:end]), output[end:]) for output, end in places[:MAX_CANDIDATES]]
    depth = max((one for one, _ in depths if one >= shortest), default=0)
    return depth, [rest for one, rest in depths if one == depth and depth][:MAX_VOTERS]


def equal_last(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_latest_matches_are_found_while_outputs_come_and_go(seed):
    rng, kept, made = random.Random(seed), [], PastOutputs()
    for _ in range(60):
        kept.append(rng.choices(range(3), k=rng.randrange(KEY_TOKENS + 1, 40)))
        made.add(array("I", kept[-1]))
        while len(kept) > 6 or (len(kept) > 1 and rng.random() < 0.2):
            del kept[0]
            made.drop_oldest()
        assert len(made) == len(kept)
        recent, shortest = rng.choices(range(3), k=12), rng.randrange(7)
        depth, ends = made.longest_matches(packed(recent), shortest)
        wanted, rests = searched(kept, recent, shortest)
        assert (depth if ends else 0) == wanted
        assert [list(made.continuation([end], 99, 0.0)) for end in ends] == rests


def test_nothing_is_drafted_beyond_an_outputs_end():
    made = past([1, 2, 3, 4], [4, 1, 2, 3, 5, 6], [9, 1, 2, 3])
    _, ends = made.longest_matches(packed([1, 2, 3]), 0)
    assert made.continuation(ends, 9, 0.1) == (5, 6)


def test_a_dropped_output_leaves_nothing():
    made = past([1, 2, 3, 4], [1, 2, 3, 4])
    made.drop_oldest()
    made.drop_oldest()
    assert made.longest_matches(packed([1, 2, 3]), 0)[1] == []
    assert (len(made._tokens), len(made._previous), made._latest) == (0, 0, {})


@pytest.mark.parametrize(
    ("paths", "least", "wanted"),
    [
        ([[1, 2, 3]], 1, [1, 2, 3]),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4]], 1, [1, 2, 4]),
        ([[1, 2, 3], [1, 2, 4]], 1, [1, 2, 3]),  # the first of equals
        ([[1, 2, 3], [1, 2, 4]], 2, [1, 2]),
        ([[1], [1, 5, 6], [1, 7, 8], [2, 9]], 1, [1, 5, 6]),  # one that ends has no vote
        ([[1, 5], [2, 6], [3, 7], [2, 8]], 1, [2, 6]),
        ([[], []], 1, []),
    ],
)
def test_the_most_frequent_token_is_followed(paths, least, wanted):
    assert likeliest(paths, least) == wanted


def test_equal_last_tokens_are_counted_in_runs_of_any_length():
    rng = random.Random(0)
    for _ in range(200):
        one, other = (rng.choices((0, 1, 256, 1 << 31), (6, 1, 1, 1), k=rng.randrange(1, 9)) for _ in range(2))
        assert num_matching(packed(one), packed(other)) == equal_last(one, other)
