import random
from array import array

import pytest

from service.engine.drafting.ngram import ARRAY_TOKENS, NgramDrafter, TokenIndex, lookup_lengths


class Tokens:
    def __init__(self, tokens=()):
        self.token_ids = array("I", tokens)


def drafted(tokens, count=4, least=2, most=3):
    return NgramDrafter(least, most).draft([Tokens(tokens)], [count])[0]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3], (4, 5, 9, 2)),
        ([7, 2, 3, 8, 1, 2, 3, 5, 6, 1, 2, 3], (5, 6, 1, 2)),  # three match before two
        ([2, 3, 4, 9, 2, 3, 5, 9, 2, 3], (5, 9, 2, 3)),  # the latest
        ([5, 6, 5, 6], (5, 6, 5, 6)),  # round and round
        ([1, 2, 3], ()),
        ([1], ()),
        ([2, 2], ()),
    ],
)
def test_a_sequence_goes_on_as_it_did_before(tokens, wanted):
    assert drafted(tokens) == wanted


def test_each_sequence_gets_its_own_number():
    one, other = Tokens([1, 2, 3, 4, 1, 2]), Tokens([1, 2, 3, 4, 1, 2])
    drafter = NgramDrafter(2, 2)
    assert drafter.draft([one, other], [1, 3]) == [(3,), (3, 4, 1)]
    drafter.on_end(one)
    drafter.on_end(other)
    assert not drafter._indexes


def latest(tokens, lengths):
    for length in lengths:
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == tokens[-length:]:
                return end
    return None


@pytest.mark.parametrize("lengths", [(1,), (3, 2), (40, 7, 2)])
def test_an_index_grown_by_any_number_of_tokens_finds_the_latest_run(lengths):
    rng = random.Random(len(lengths))
    for _ in range(20):
        sequence, index = Tokens(), TokenIndex(lengths)
        for _ in range(8):
            count = rng.choice((0, 1, 2, ARRAY_TOKENS + 1, 90))
            again = rng.randrange(len(sequence.token_ids) + 1)
            sequence.token_ids.extend(sequence.token_ids[again : again + count] or rng.choices(range(9), k=count))
            if sequence.token_ids:
                assert index.find(sequence) == latest(sequence.token_ids, lengths)


def test_a_wide_range_of_lengths_is_looked_for_in_few():
    assert lookup_lengths(2, 5) == (5, 4, 3, 2)
    assert lookup_lengths(1, 64) == (64, 16, 4, 1)
