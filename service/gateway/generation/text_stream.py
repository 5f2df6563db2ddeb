"""Tokens to text: nothing is told before it is certain to be told, and the first stop string ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from model.text.detokenizer import Detokenizer


class DecodedText(NamedTuple):
    """What a push made certain."""

    text: str
    num_tokens: int  # of the pushed ones, those that belong to the answer
    stopped: bool = False  # a stop string is complete: nothing may be pushed any more


class TextStream:
    """One answer's text. `push` and `end` together tell every character once, in order, up to the stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """Nothing stops within the first `min_tokens`; what began there may be completed behind them."""
        self._detokenizer = detokenizer
        self._matchers = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._num_unstoppable = min_tokens  # tokens still to come that nothing stops
        self._held = ""

    def push(self, ids: Sequence[int]) -> DecodedText:
        """The next tokens of the answer."""
        if not self._matchers:
            return DecodedText(self._detokenizer.push(ids), len(ids))
        decoded = ""
        # One at a time, so that the answer ends with the very token that completes a stop string.
        for count, token in enumerate(ids, 1):
            self._num_unstoppable -= 1
            text, stopped = self._pass(self._detokenizer.push((token,)))
            decoded += text
            if stopped:
                return DecodedText(decoded, count, stopped=True)
        return DecodedText(decoded, len(ids))

    def end(self) -> DecodedText:
        """No token follows: what was held back is told."""
        text, stopped = self._pass(self._detokenizer.flush())
        if stopped:
            return DecodedText(text, 0, stopped=True)
        held, self._held = self._held, ""
        return DecodedText(text + held, 0)

    def _pass(self, text: str) -> tuple[str, bool]:
        """New text through the matchers: what may be told of it and of what was held; whether a stop is complete."""
        pending = self._held + text
        for index, char in enumerate(text, len(self._held) + 1):
            # A list, not a generator: every matcher has to see the character.
            complete = [matcher.length for matcher in self._matchers if matcher.feed(char)]
            if complete and self._num_unstoppable < 0:
                self._held = ""
                return pending[: index if self._include_stop else index - max(complete)], True
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut], False


class _Matcher:
    """Knuth, Morris and Pratt: how much of the string's start ends what was fed, in constant time a character."""

    def __init__(self, string: str) -> None:
        self.length = len(string)
        self.num_matched = 0
        self._string = string
        self._borders = _borders(string)

    def feed(self, char: str) -> bool:
        """Whether the string is complete with `char`."""
        matched = self.num_matched
        while matched and self._string[matched] != char:
            matched = self._borders[matched - 1]
        if self._string[matched] == char:
            matched += 1
        is_complete = matched == self.length
        self.num_matched = self._borders[-1] if is_complete else matched  # it may go on where it may not stop yet
        return is_complete


def _borders(string: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that also ends it."""
    borders = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = borders[matched - 1]
        matched += string[index] == string[matched]
        borders[index] = matched
    return borders


def without_end_token(ids: Sequence[int], end_ids: Collection[int]) -> Sequence[int]:
    """`ids` less a last one that only ended the generation and is no part of the text."""
    return ids[:-1] if ids and ids[-1] in end_ids else ids
