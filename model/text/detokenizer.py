"""Streaming detokenizers; each character is emitted exactly once."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from itertools import takewhile

CONTEXT_TOKENS = 4  # preceding tokens that can affect a token's text
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes, so a U+FFFD held longer is final


class Detokenizer(ABC):
    """Converts one stream of token ids to text; unknown ids have none. Not thread-safe."""

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Append `ids` and return the newly final text."""

    @abstractmethod
    def flush(self) -> str:
        """Return the held text; an incomplete character becomes U+FFFD."""

    @abstractmethod
    def push_bytes(self, token_id: int) -> bytes:
        """Append one token and return its bytes; concatenated, they are the UTF-8 text."""

    @abstractmethod
    def peek_bytes(self, token_id: int) -> bytes | None:
        """Return the result of `push_bytes` without pushing; None if not predictable."""


class ByteDetokenizer(Detokenizer):
    """Decodes tokens with fixed bytes; holds back only an incomplete UTF-8 tail."""

    def __init__(self, pieces: Sequence[bytes], num_spaces_to_strip: int) -> None:
        """Take each token's bytes by id; drop up to `num_spaces_to_strip` leading spaces."""
        self._pieces = pieces
        self._num_spaces_to_strip = num_spaces_to_strip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        size = len(pieces)
        text = self._decode(b"".join([pieces[i] for i in ids if 0 <= i < size]))
        return self._stripped(text) if self._num_spaces_to_strip else text

    def flush(self) -> str:
        return self._decode(b"", True)

    def push_bytes(self, token_id: int) -> bytes:
        piece, rest = self._piece(token_id), self.peek_bytes(token_id)
        num_stripped = len(piece) - len(rest)
        self._num_spaces_to_strip = 0 if rest else self._num_spaces_to_strip - num_stripped
        return rest

    def peek_bytes(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        num_spaces = len(piece) - len(piece.lstrip(b" "))
        return piece[min(num_spaces, self._num_spaces_to_strip) :]

    def _piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def _stripped(self, text: str) -> str:
        rest = text.lstrip(" ")
        num_spaces = min(len(text) - len(rest), self._num_spaces_to_strip)
        self._num_spaces_to_strip = 0 if rest else self._num_spaces_to_strip - num_spaces
        return text[num_spaces:]


class WindowDetokenizer(Detokenizer):
    """Re-decodes the last few tokens with each new one and emits the difference."""

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int], text_ids: Container[int]) -> None:
        """Continue the text of `context`; ids outside `text_ids` are skipped."""
        self._decode = decode
        self._text_ids = text_ids
        self._window = list(context)
        self._emitted = decode(self._window)
        self._num_held = 0

    def push(self, ids: Sequence[int]) -> str:
        new = [i for i in ids if i in self._text_ids]
        if not new:
            return ""
        self._window += new
        self._num_held += len(new)
        text = self._decode(self._window)
        if text.endswith("\ufffd") and self._num_held <= MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def push_bytes(self, token_id: int) -> bytes:
        return self.push((token_id,)).encode()

    def peek_bytes(self, token_id: int) -> bytes | None:
        return None

    def _emit(self, text: str) -> str:
        emitted, self._num_held = self._emitted, 0
        self._window = self._window[-CONTEXT_TOKENS:]
        self._emitted = self._decode(self._window)
        return text[len(emitted) :] if text.startswith(emitted) else text[_common_prefix_length(emitted, text) :]


def _common_prefix_length(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
