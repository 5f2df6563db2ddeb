"""Bytes of each token id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from model.errors import ModelError
from model.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

MAX_VOCAB_SIZE = 2**22  # ids come from the file, and tables are as long as the largest id
METASPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Bytes by token id, 0..size - 1; some ids may be unused. Immutable."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        """Read `backend`, which may change later. Raises ModelError if ids are out of range."""
        tokens = _read_tokens(backend)
        ids = frozenset(i for i, token in enumerate(tokens) if token is not None)
        self._decoding = TokenDecoding.of(backend)
        self._backend = backend if self._decoding else tokenizers.Tokenizer.from_str(backend.to_str())
        self._text_ids = ids
        self._text_ids_without_specials = ids - special_ids
        self._anchor = [i for i in sorted(ids - special_ids) if (tokens[i] or "").isalpha()][:1]
        self.pieces = self._read_pieces(tokens, special_ids)
        self._special_ids = special_ids
        self._pieces_by_shown: dict[frozenset[int], list[bytes]] = {}

    @property
    def size(self) -> int:
        return len(self.pieces)

    def detokenizer(
        self, skip_special_tokens: bool, at_start: bool, shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a new detokenizer, which never skips `shown_ids`."""
        if self._decoding is None:
            text_ids = self._text_ids_without_specials | shown_ids if skip_special_tokens else self._text_ids
            return WindowDetokenizer(self._decode, [] if at_start else self._anchor, text_ids)
        pieces = self._pieces_showing(shown_ids) if skip_special_tokens else self.pieces
        return ByteDetokenizer(pieces, self._decoding.num_spaces_to_strip if at_start else 0)

    def _pieces_showing(self, shown_ids: frozenset[int]) -> list[bytes]:
        if shown_ids not in self._pieces_by_shown:
            hidden = self._special_ids - shown_ids
            self._pieces_by_shown[shown_ids] = [b"" if i in hidden else piece for i, piece in enumerate(self.pieces)]
        return self._pieces_by_shown[shown_ids]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _read_pieces(self, tokens: list[str | None], special_ids: frozenset[int]) -> list[bytes]:
        if self._decoding is None:
            start = len(self._decode(self._anchor))  # the anchor makes each token a continuation
            return [self._decode([*self._anchor, i])[start:].encode() if t else b"" for i, t in enumerate(tokens)]
        verbatim = special_ids | _ids_outside_model(self._backend)
        alphabet = byte_alphabet()
        return [
            token.encode() if i in verbatim else self._decoding.token_bytes(token, alphabet)
            for i, token in enumerate(token or "" for token in tokens)
        ]


def _read_tokens(backend: tokenizers.Tokenizer) -> list[str | None]:
    """Return each id's text, including added tokens; None if unused."""
    id_by_token = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    size = max([*id_by_token.values(), *added], default=-1) + 1
    if not 0 < size <= MAX_VOCAB_SIZE:
        raise ModelError(f"the tokenizer has {size} token ids (1 to {MAX_VOCAB_SIZE} are supported)")
    tokens: list[str | None] = [None] * size
    for token, token_id in id_by_token.items():
        tokens[token_id] = token
    for token_id, added_token in added.items():
        tokens[token_id] = added_token.content
    return tokens


def _ids_outside_model(backend: tokenizers.Tokenizer) -> set[int]:
    """Return the ids of added tokens that the model lacks; these are plain text."""
    own = backend.get_vocab(with_added_tokens=False)
    return {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.content not in own}


@dataclass(frozen=True, kw_only=True)
class TokenDecoding:
    """Decoder that maps each token to fixed bytes."""

    byte_level: bool = False  # GPT-2's alphabet
    byte_fallback: bool = False  # tokens named <0xXX> are single bytes
    num_spaces_to_strip: int = 0  # at the start of a text

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenDecoding | None:
        """Return the decoding of `backend`; None if tokens cannot be decoded independently."""
        if backend.decoder is None:
            return None
        steps = _steps(json.loads(backend.decoder.__getstate__()))
        match [step["type"] for step in steps]:
            case ["ByteLevel"]:
                return cls(byte_level=True)
            case ["Metaspace"] | ["ByteFallback", "Metaspace"]:
                return cls._of_metaspace(steps[-1], byte_fallback=len(steps) > 1)
            case ["Replace", "ByteFallback", "Fuse"] | ["Replace", "ByteFallback", "Fuse", "Strip"]:
                return cls._of_sentencepiece(steps)
        return None

    @classmethod
    def _of_metaspace(cls, step: dict[str, Any], byte_fallback: bool) -> TokenDecoding | None:
        if step["replacement"] != METASPACE:
            return None
        return cls(byte_fallback=byte_fallback, num_spaces_to_strip=0 if step["prepend_scheme"] == "never" else 1)

    @classmethod
    def _of_sentencepiece(cls, steps: list[dict[str, Any]]) -> TokenDecoding | None:
        replace, strips = steps[0], steps[3:]
        if replace["pattern"] != {"String": METASPACE} or replace["content"] != " ":
            return None
        if any(strip["content"] != " " or strip["stop"] != 0 for strip in strips):
            return None
        return cls(byte_fallback=True, num_spaces_to_strip=sum(strip["start"] for strip in strips))

    def token_bytes(self, token: str, alphabet: Mapping[str, int]) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(alphabet.__getitem__, token))
            except KeyError:  # not in the alphabet: plain text
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each GPT-2 character: printable Latin-1 is itself, other bytes are from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
