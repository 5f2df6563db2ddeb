"""Incremental detokenization up to a stop string; emitted text is final."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from model.text.detokenizer import Detokenizer


class DecodedText(NamedTuple):
    text: str
    num_tokens: int  # pushed tokens that belong to the response
    stop: str | None = None  # the matched stop string; push nothing after it

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class TextStream:
    """Text of one branch. `push` and `end` emit every character once, in order."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """The first `min_tokens` tokens cannot complete a stop string, but may begin one."""
        self._detokenizer = detokenizer
        self._matchers = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._num_unstoppable = min_tokens  # tokens left
        self._held = ""

    def push(self, ids: Sequence[int]) -> DecodedText:
        if not self._matchers:
            return DecodedText(self._detokenizer.push(ids), len(ids))
        decoded = ""
        # One at a time: the response ends with the token that completes a stop string.
        for count, token in enumerate(ids, 1):
            self._num_unstoppable -= 1
            text, stop = self._match(self._detokenizer.push((token,)))
            decoded += text
            if stop is not None:
                return DecodedText(decoded, count, stop)
        return DecodedText(decoded, len(ids))

    def end(self) -> DecodedText:
        text, stop = self._match(self._detokenizer.flush())
        if stop is not None:
            return DecodedText(text, 0, stop)
        held, self._held = self._held, ""
        return DecodedText(text + held, 0)

    def _match(self, text: str) -> tuple[str, str | None]:
        """Return the final text, and the longest completed stop string."""
        pending = self._held + text
        for index, char in enumerate(text, len(self._held) + 1):
            # Not a generator: every matcher must see the character.
            complete = [matcher.string for matcher in self._matchers if matcher.feed(char)]
            if complete and self._num_unstoppable < 0:
                self._held = ""
                stop = max(complete, key=len)
                return pending[: index if self._include_stop else index - len(stop)], stop
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut], None


class _Matcher:
    """Knuth-Morris-Pratt matcher: tracks the longest prefix of `string` that ends the fed text."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._borders = _borders(string)

    def feed(self, char: str) -> bool:
        matched = self.num_matched
        while matched and self.string[matched] != char:
            matched = self._borders[matched - 1]
        if self.string[matched] == char:
            matched += 1
        is_complete = matched == len(self.string)
        self.num_matched = self._borders[-1] if is_complete else matched  # matching continues within `min_tokens`
        return is_complete


def _borders(string: str) -> list[int]:
    borders = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = borders[matched - 1]
        matched += string[index] == string[matched]
        borders[index] = matched
    return borders


def without_end_token(ids: Sequence[int], end_ids: Collection[int]) -> Sequence[int]:
    """Return `ids` without a trailing end token."""
    return ids[:-1] if ids and ids[-1] in end_ids else ids
