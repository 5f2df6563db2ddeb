"""Token rules, with or without a grammar: allowed ids, bad words, a reasoning-token budget.

They depend only on the answer's tokens, so an engine that resumes the answer applies the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from model.sampling_params import ReasoningBudget, TokenRules
from model.text.grammar_matcher import ALL, Matcher, num_mask_words

BLANKS = b" \t\r\n"


class RulesMatcher:
    """State of one answer under its rules and grammar, with `Matcher`'s interface. Not thread-safe."""

    def __init__(self, rules: TokenRules, pieces: Sequence[bytes], inner: Matcher | None) -> None:
        """Take each token's bytes and the grammar's matcher, if any."""
        self._rules = rules
        self._inner = inner
        self._allowed = _mask_of(rules.allowed_token_ids, len(pieces)) if rules.allowed_token_ids else None
        self._reasoning = None if rules.reasoning is None else _ReasoningCount(rules.reasoning, pieces)
        self._num_kept = max((len(word) - 1 for word in rules.bad_words), default=0)
        self._last_ids: list[int] = []  # at most `_num_kept`
        self._is_stuck = False

    @property
    def has_failed(self) -> bool:
        return self._is_stuck or (self._inner is not None and self._inner.has_failed)

    @property
    def is_complete(self) -> bool:
        return self._inner is None or self._inner.is_complete

    @property
    def is_finished(self) -> bool:
        return self._inner is not None and self._inner.is_finished

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Consume tokens; return False if the grammar forbids them."""
        if self._reasoning is not None:
            for token in token_ids:
                self._reasoning.advance(token)
        if self._num_kept:
            self._last_ids = [*self._last_ids, *token_ids][-self._num_kept :]
        return self._inner is None or self._inner.advance(token_ids)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest valid prefix of `token_ids`."""
        most = len(token_ids) if self._inner is None else self._inner.num_valid(token_ids)
        ahead = self._copy_with(None)
        for count, token in enumerate(token_ids[:most]):
            if not ahead._permits(token):
                return count
            ahead.advance((token,))
        return most

    def forced_tokens(self) -> tuple[int, ...]:
        """Return the forced next tokens, if any."""
        forced = () if self._reasoning is None else self._reasoning.forced_ids
        return forced if forced or self._inner is None else self._inner.forced_tokens()

    def fill_mask(self, words: np.ndarray, end_token_ids: Iterable[int]) -> bool:
        """Fill a mask like `Matcher.fill_mask`; a forced token overrides the grammar and the other rules."""
        forced = None if self._reasoning is None else self._reasoning.forced_id
        if forced is not None:
            words[:] = 0
            words[forced // 32] = _bit(forced)
            return True
        if self._inner is None:
            words[:] = ALL
        elif not self._inner.fill_mask(words, end_token_ids):
            return False
        if self._allowed is not None:
            words &= self._allowed
        for word in self._rules.bad_words:
            if self._ends_with(word[:-1]):
                words[word[-1] // 32] &= ~_bit(word[-1])
        if not words.any():
            self._is_stuck = True
            words[:] = ALL
        return not self._is_stuck

    def copy(self) -> RulesMatcher:
        return self._copy_with(None if self._inner is None else self._inner.copy())

    def _permits(self, token: int) -> bool:
        forced = None if self._reasoning is None else self._reasoning.forced_id
        if forced is not None:
            return token == forced
        is_allowed = self._allowed is None or bool(self._allowed[token // 32] & _bit(token))
        return is_allowed and not any(
            word[-1] == token and self._ends_with(word[:-1]) for word in self._rules.bad_words
        )

    def _ends_with(self, start: tuple[int, ...]) -> bool:
        return not start or tuple(self._last_ids[-len(start) :]) == start

    def _copy_with(self, inner: Matcher | None) -> RulesMatcher:
        other = object.__new__(RulesMatcher)
        other.__dict__ |= self.__dict__
        other._inner = inner
        other._reasoning = None if self._reasoning is None else self._reasoning.copy()
        return other


class _ReasoningCount:
    """Counts reasoning tokens and forces the end marker once the budget is spent."""

    def __init__(self, budget: ReasoningBudget, pieces: Sequence[bytes]) -> None:
        self._budget = budget
        self._pieces = pieces
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._is_open = budget.is_open
        self._is_over = False
        self._tail = b""  # of the answer; a marker may begin in it
        self._num_tokens = 0
        self._num_forced = 0  # end-marker tokens so far

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """The rest of the end marker, once the budget is spent."""
        is_spent = self._is_open and self._num_tokens >= self._budget.max_tokens
        return self._budget.end_ids[self._num_forced :] if is_spent else ()

    @property
    def forced_id(self) -> int | None:
        return next(iter(self.forced_ids), None)

    def advance(self, token: int) -> None:
        if self._is_over:
            return
        forced = self.forced_id
        self._tail += self._pieces[token] if token < len(self._pieces) else b""
        if self._is_open:
            self._num_tokens += forced is None
            self._num_forced += forced == token
            self._is_over = self._end in self._tail or self._num_forced == len(self._budget.end_ids)
            self._is_open = not self._is_over
            self._tail = self._tail[1 - len(self._end) :]
        elif self._start in self._tail:
            self._is_open, self._tail = True, b""
        else:
            self._is_over = not self._start.startswith(self._tail.lstrip(BLANKS).removeprefix(b"\xff"))

    def copy(self) -> _ReasoningCount:
        other = object.__new__(_ReasoningCount)
        other.__dict__ |= self.__dict__
        return other


def _mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    words = np.zeros(num_mask_words(vocab_size), np.uint32)
    for token in token_ids:
        words[token // 32] |= _bit(token)
    return words


def _bit(token: int) -> np.uint32:
    return np.uint32(1 << token % 32)
