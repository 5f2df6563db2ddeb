"""How `tokenizer.json` writes a token, and which decoders let a token be read alone, as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

METASPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A decoder that maps every token to fixed bytes."""

    byte_level: bool = False  # GPT-2's alphabet: one printable character for each byte
    byte_fallback: bool = False  # tokens named <0xXX> are single bytes
    num_spaces_to_strip: int = 0  # at the start of a text

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Decoding | None:
        """Return what the decoder of `backend` does; None if tokens cannot be read one by one."""
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
    def _of_metaspace(cls, step: dict[str, Any], byte_fallback: bool) -> Decoding | None:
        if step["replacement"] != METASPACE:
            return None
        return cls(byte_fallback=byte_fallback, num_spaces_to_strip=0 if step["prepend_scheme"] == "never" else 1)

    @classmethod
    def _of_sentencepiece(cls, steps: list[dict[str, Any]]) -> Decoding | None:
        """Read the sequence that SentencePiece models are converted to."""
        replace, strips = steps[0], steps[3:]
        if replace["pattern"] != {"String": METASPACE} or replace["content"] != " ":
            return None
        if any(strip["content"] != " " or strip["stop"] != 0 for strip in strips):
            return None
        return cls(byte_fallback=True, num_spaces_to_strip=sum(strip["start"] for strip in strips))

    def token_bytes(self, token: str, alphabet: Mapping[str, int]) -> bytes:
        """Return the bytes of a token of the model's own vocabulary; `alphabet` is `byte_alphabet()`."""
        if self.byte_level:
            try:
                return bytes(map(alphabet.__getitem__, token))
            except KeyError:  # outside the alphabet, so the token is its own text
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decoder's steps in order, nested sequences flattened."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable Latin-1 as itself, the rest from U+0100 up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
