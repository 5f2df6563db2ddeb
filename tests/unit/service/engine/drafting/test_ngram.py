from array import array
from types import SimpleNamespace

import pytest

from service.engine.drafting.ngram import NgramDrafter, rfind_tokens


def drafted(tokens, count=4, least=2, most=3):
    sequence = SimpleNamespace(token_ids=array("I", tokens))
    return NgramDrafter(least, most).draft([sequence], [count])[0]


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


def test_bytes_that_match_across_two_tokens_are_none():
    found = rfind_tokens(array("I", [0x01010101, 0x01010101 << 8 & 0xFFFFFFFF, 5, 0x01010101]).tobytes(), 1)
    assert found == 0
    assert rfind_tokens(array("I", [0x01000000, 0x00000001, 0x00000100]).tobytes(), 1) is None


def test_each_sequence_gets_its_own_number():
    sequence = SimpleNamespace(token_ids=array("I", [1, 2, 3, 4, 1, 2]))
    assert NgramDrafter(2, 2).draft([sequence, sequence], [1, 3]) == [(3,), (3, 4, 1)]
