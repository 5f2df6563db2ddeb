from array import array

from service.engine.drafting.shadow import FIRST_RATES, LONGEST_STREAK, ShadowDrafts
from tests.fakes.drafters import FakeDrafter


class Tokens:
    def __init__(self, *tokens):
        self.token_ids = array("I", tokens)


class CountingDrafter(FakeDrafter):
    """Drafter that guesses the last token plus 1; nothing after 99."""

    num_calls = 0

    def of(self, sequence, count):
        self.num_calls += 1
        last = sequence.token_ids[-1]
        return tuple(range(last + 1, last + 1 + count)) if last != 99 else ()


def test_right_guesses_make_a_streak_and_a_wrong_one_ends_it():
    shadows, one = ShadowDrafts(CountingDrafter(), 8), Tokens(10)
    for streak, token in enumerate((11, 12, 13, 70, 71)):
        ((_, shadow),) = shadows.look([one])
        assert shadow.streak == (streak if token < 71 else 0)
        assert shadow.drafts[shadow.num_right] == one.token_ids[-1] + 1
        one.token_ids.append(token)


def test_several_tokens_of_one_step_are_compared_in_order():
    shadows, one = ShadowDrafts(CountingDrafter(), 8), Tokens(10)
    shadows.look([one])
    one.token_ids.extend((11, 12, 13, 50))
    ((_, shadow),) = shadows.look([one])
    assert (shadow.streak, shadow.drafts[:2]) == (0, (51, 52))
    one.token_ids.extend(range(51, 60))  # beyond the guesses
    assert shadows.look([one])[0][1].streak == 8


def test_a_sequence_is_drafted_again_when_half_is_used():
    drafter = CountingDrafter()
    shadows, one = ShadowDrafts(drafter, 8), Tokens(10)
    for token in range(11, 19):
        shadows.look([one])
        one.token_ids.append(token)
    assert drafter.num_calls == 2


def test_without_a_guess_there_is_nothing():
    shadows, one = ShadowDrafts(CountingDrafter(), 8), Tokens(50)
    shadows.look([one])
    one.token_ids.append(99)
    assert shadows.look([one]) == []
    shadows.on_end(one)
    assert not shadows._shadows


def test_rates_are_learned_by_streak():
    shadows = ShadowDrafts(CountingDrafter(), 4)
    assert shadows.gains(0)[0] == FIRST_RATES[0]
    right, wrong = Tokens(10), Tokens(10)
    for number in range(200):
        shadows.look([right, wrong])
        right.token_ids.append(11 + number)
        wrong.token_ids.append(5)
    assert shadows.gains(0)[0] < 0.1
    assert shadows.gains(LONGEST_STREAK)[3] > 0.9
    assert shadows.gains(1000) == shadows.gains(LONGEST_STREAK)
