"""Computes the bit mask of next tokens allowed by a grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher

from model.text.grammar_compiler import SPECIAL, TextCompiler, Tokens

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_CHARS = 1 << 20
"""Total grammar text; compiled, it takes about 100 times as much memory."""
JSON = "%json"  # in every JSON grammar
ALL = np.uint32(0xFFFFFFFF)
MAX_DIGITS = 32
"""Max consecutive digits if JSON allows another token: a model may repeat a digit for ever."""


class GrammarCompiler:
    """Compiles and caches grammars over one model's tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokens, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Take the width of the logits as `vocab_size`; unused ids are never allowed."""
        self.num_words = num_mask_words(vocab_size)
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._compiler = TextCompiler(tokenizer, vocab_size, self._eos_token_ids)
        self.pieces = self._compiler.pieces  # bytes by token id
        self._digits = _DigitRuns(self.pieces, self.num_words)
        self._pieces = _Pieces(self.pieces)
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_cached_chars = 0
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> Matcher:
        """Return a new matcher within a second, mostly without the GIL. Raises GrammarError."""
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
        if found is None:
            found = self._compiler.compile(grammar)
            with self._lock:
                self._cache_matcher(grammar, found)
        digits = self._digits if JSON in grammar else None
        return Matcher(found.deep_copy(), self._eos_token_ids, digits, pieces=self._pieces)

    def _cache_matcher(self, grammar: str, matcher: LLMatcher) -> None:
        if grammar not in self._cache:
            self._num_cached_chars += len(grammar)
        self._cache[grammar] = matcher
        while len(self._cache) > MAX_CACHED_GRAMMARS or (
            self._num_cached_chars > MAX_CACHED_CHARS and len(self._cache) > 1
        ):
            dropped, _ = self._cache.popitem(last=False)
            self._num_cached_chars -= len(dropped)


class Matcher:
    """The grammar state of one text. Not thread-safe."""

    def __init__(
        self,
        inner: LLMatcher,
        eos_token_ids: Sequence[int],
        digits: _DigitRuns | None,
        num_digits: int = 0,
        pieces: _Pieces | None = None,
    ) -> None:
        """Bound runs of digits if `digits` is set; `num_digits` is the current run's length."""
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._digits = digits
        self._num_digits = num_digits
        self._pieces = pieces
        self._is_stuck = False

    @property
    def has_failed(self) -> bool:
        """True after an exceeded limit or a mismatch; the matcher then constrains nothing."""
        return self._is_stuck or self._inner.is_error()

    @property
    def is_complete(self) -> bool:
        return self._inner.is_accepting()

    @property
    def is_finished(self) -> bool:
        return self._inner.is_stopped()

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Consume tokens. A mismatch returns False and fails the matcher."""
        if self._is_stuck:
            return False
        if self._digits is not None:
            for token in token_ids:
                self._num_digits = self._digits.num_digits_after(token, self._num_digits)
        return self._inner.consume_tokens(list(token_ids))

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest valid prefix of `token_ids`."""
        if self.has_failed or self.is_finished:
            return 0
        return self._inner.validate_tokens(list(token_ids))

    def forced_tokens(self) -> tuple[int, ...]:
        """Return the tokens of the forced text, longest match first."""
        if self._pieces is None or self.has_failed or self.is_finished:
            return ()
        return self._pieces.split(self._inner.compute_ff_bytes())

    def fill_mask(self, words: np.ndarray, end_token_ids: Iterable[int]) -> bool:
        """Set words uint32[num_words] to the allowed tokens: token i is bit i % 32 of word i // 32.

        `end_token_ids` are allowed where the text may end; EOS only if among them. Releases the GIL. Returns False and
        allows everything if the matcher has failed.
        """
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._inner.is_error():
            words[:] = ALL
            return False
        for token in self._eos_token_ids:
            words[token // 32] &= ~_bit(token)
        if self._inner.is_accepting():
            for token in end_token_ids:
                words[token // 32] |= _bit(token)
        if not words.any():
            # Only EOS fits: grammars may name it, but no text contains it.
            self._is_stuck = True
            words[:] = ALL
            return False
        if self._digits is not None and self._num_digits >= MAX_DIGITS:
            others = words & ~self._digits.starts_with_digit
            if others.any():
                words[:] = others
        return True

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), self._eos_token_ids, self._digits, self._num_digits, self._pieces)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _bit(token: int) -> np.uint32:
    return np.uint32(1 << token % 32)


class _Pieces:
    """Token ids by their bytes."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ids = {data: token for token, data in enumerate(tokens) if data and not data.startswith(SPECIAL)}
        self._longest = max(map(len, self._ids), default=0)

    def split(self, text: bytes) -> tuple[int, ...]:
        """Tokenize `text` by longest match, without the last token: more text may follow."""
        found: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), start)
            if end in (start, len(text)):
                break
            found.append(self._ids[text[start:end]])
            start = end
        return tuple(found)


class _DigitRuns:
    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        self.starts_with_digit = np.zeros(num_words, np.uint32)
        self._num_at_end: dict[int, int] = {}  # only tokens that end with a digit
        self._only_digits: set[int] = set()
        for token, data in enumerate(tokens):
            rest = data.rstrip(b"0123456789")
            if data[:1].isdigit():
                self.starts_with_digit[token // 32] |= _bit(token)
            if len(rest) < len(data):
                self._num_at_end[token] = len(data) - len(rest)
                if not rest:
                    self._only_digits.add(token)

    def num_digits_after(self, token: int, num_digits: int) -> int:
        return self._num_at_end.get(token, 0) + (num_digits if token in self._only_digits else 0)
