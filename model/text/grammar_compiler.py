"""Compiles grammars to llguidance matchers. Imports neither NumPy nor a tokenizer library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from model.errors import GrammarError
from model.text.grammar import HEADER

MAX_GRAMMAR_BYTES = 2 << 20
MAX_ERROR_CHARS = 160
MAX_LEXER_STATES = 20_000  # about 2 KB each
REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
POSITION = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
SPECIAL = b"\xff"
"""Prefix of special tokens' bytes; no text contains it."""


class Tokens(Protocol):
    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class NamedTokens(Tokens, Protocol):
    @property
    def special_tokens(self) -> frozenset[str]: ...

    def special_id(self, text: str) -> int | None: ...


@dataclass(frozen=True)
class TokenTable:
    """A model's tokens as plain values, for another process."""

    pieces: list[bytes]  # by id, vocab_size long; empty for unused ids
    id_by_special: dict[str, int]
    eos_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: NamedTokens, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenTable:
        return cls(
            pieces=[tokenizer.token_bytes(token) for token in range(vocab_size)],
            id_by_special={
                text: i for text in sorted(tokenizer.special_tokens) if (i := tokenizer.special_id(text)) is not None
            },
            eos_token_ids=[token for token in eos_token_ids if token < vocab_size],
        )

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.id_by_special.values())

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def special_id(self, text: str) -> int | None:
        return self.id_by_special.get(text)


class TextCompiler:
    """Compiles the grammars of `model.text.grammar`. Thread-safe."""

    def __init__(self, tokens: Tokens, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Take the width of the logits as `vocab_size`; unused ids are never allowed."""
        vocabulary = _Vocabulary(tokens, vocab_size, eos_token_ids)
        self.pieces: Sequence[bytes] = vocabulary.tokens
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, grammar: str) -> LLMatcher:
        """Compile a grammar, usually within milliseconds. Raises GrammarError.

        Compile clients' grammars in a killable process: llguidance bounds neither time nor memory for intersecting
        patterns.
        """
        if len(grammar.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"The grammar takes more than {MAX_GRAMMAR_BYTES} bytes.")
        found = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if found.is_error():
            raise GrammarError(f"The grammar cannot be compiled: {_reason(found.get_error())}")
        return found


class _Vocabulary:
    def __init__(self, tokens: Tokens, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.bos_token_id = None
        special = tokens.special_ids
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.tokens = [
            SPECIAL + tokens.token_bytes(token) if token in special else tokens.token_bytes(token)
            for token in range(vocab_size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        """Never called: our grammars force no text."""
        raise NotImplementedError


def _reason(error: str) -> str:
    """Return the first line of llguidance's error, or its regex error, with the line in the client's grammar."""
    first, _, rest = error.partition("\n")
    position, of_regex = POSITION.match(first), REGEX_ERROR.search(rest)
    text = f"regular expression: {of_regex[1]}" if of_regex else first[position.end() if position else 0 :].strip()
    if position:
        text = f"line {int(position[1]) - HEADER.count(chr(10))}: {text}"
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_ERROR_CHARS])
