"""Rules on single tokens: masks with and without a grammar, copies, and a budget of reasoning tokens."""

from __future__ import annotations

import numpy as np

from model.sampling_params import ReasoningBudget, TokenRules
from model.text.token_rules import RulesMatcher

PIECES = [b"a", b"b", b"<think>", b"</", b"think>", b" ", b"\xff[END]", b""]
A, B, START, END1, END2, BLANK, SPECIAL, EOS = range(8)


class Grammar:
    """Allows `a` and `b` alone."""

    has_failed = is_finished = False
    is_complete = True

    def advance(self, token_ids):
        return not {*token_ids} - {A, B}

    def num_valid(self, token_ids):
        return next((i for i, token in enumerate(token_ids) if token not in (A, B)), len(token_ids))

    def forced_tokens(self):
        return (A,)

    def fill_mask(self, words, end_token_ids):
        words[:] = 1 << A | 1 << B
        return True

    def copy(self):
        return self


def allowed(matcher):
    words = np.empty(1, np.uint32)
    ok = matcher.fill_mask(words, (EOS,))
    return {token for token in range(8) if words[0] >> token & 1} if ok else None


def budget(max_tokens, *, is_open=True, end_ids=(END1, END2), end="</think>"):
    reasoning = ReasoningBudget(max_tokens=max_tokens, start="<think>", end=end, end_ids=end_ids, is_open=is_open)
    return RulesMatcher(TokenRules(reasoning=reasoning), PIECES, None)


def test_allowed_ids_and_bad_words():
    rules = TokenRules(allowed_token_ids=(A, B, EOS), bad_words=((B, A), (EOS,)))
    matcher = RulesMatcher(rules, PIECES, None)
    assert allowed(matcher) == {A, B}
    assert matcher.advance((B,))
    assert allowed(matcher) == {B}
    assert allowed(matcher.copy()) == {B}
    assert matcher.advance((A, A))
    assert allowed(matcher) == {A, B}
    with_grammar = RulesMatcher(TokenRules(allowed_token_ids=(B, EOS)), PIECES, Grammar())
    assert allowed(with_grammar) == {B}
    assert not with_grammar.copy().advance((EOS,))
    nothing = RulesMatcher(TokenRules(allowed_token_ids=(EOS,)), PIECES, Grammar())
    assert allowed(nothing) is None
    assert nothing.has_failed


def test_the_end_is_forced_after_the_budget():
    matcher = budget(2)
    matcher.advance((A,))
    assert len(allowed(matcher)) == 8
    other = matcher.copy()
    matcher.advance((B,))
    for token in (END1, END2):
        assert allowed(matcher) == {token}
        assert allowed(matcher.copy()) == {token}
        matcher.advance((token,))
    assert len(allowed(matcher)) == 8
    other.advance((END1,))
    assert allowed(other) == {END1}  # it has not ended by itself
    assert allowed(budget(0)) == {END1}


def test_its_own_end_needs_no_forcing():
    matcher = budget(3)
    matcher.advance((A, END1, END2, A, A, A, A))
    assert len(allowed(matcher)) == 8
    special = budget(3, end="[END]", end_ids=(SPECIAL,))
    special.advance((A, SPECIAL, A, A))
    assert len(allowed(special)) == 8


def test_the_answer_may_open_it_or_not():
    for first, is_counted in (((BLANK, START), True), ((START,), True), ((A, START), False), ((EOS, A), False)):
        matcher = budget(1, is_open=False)
        matcher.advance(first)
        assert len(allowed(matcher)) == 8
        matcher.advance((A,))
        assert (allowed(matcher) == {END1}) == is_counted


def test_drafts_are_cut_where_a_rule_forbids_them():
    rules = TokenRules(allowed_token_ids=(A, B, BLANK), bad_words=((B, A),))
    free, held = RulesMatcher(rules, PIECES, None), RulesMatcher(rules, PIECES, Grammar())
    assert [free.num_valid(ids) for ids in ((A, A, B, A), (BLANK, EOS), ())] == [3, 1, 0]
    assert [held.num_valid(ids) for ids in ((A, A, B, A), (BLANK, EOS))] == [3, 0]
    assert (free.forced_tokens(), held.forced_tokens()) == ((), (A,))
    spent = budget(1)
    spent.advance((A,))
    assert spent.forced_tokens() == (END1, END2)
    assert [spent.num_valid(ids) for ids in ((END1, END2, A), (END1, A), (A,))] == [3, 1, 0]
    assert budget(2).num_valid((A, A, A, END1)) == 2
