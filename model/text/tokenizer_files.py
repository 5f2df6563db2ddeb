"""Tokenizer files: size limits, special tokens, and bounds on text growth.

Thirty replacements of "a" by "aa" turn one character into a gigabyte, so the product of the steps' growth factors (in
UTF-8 bytes) is bounded.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.json_files import read_bytes, read_json_object

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
MAX_CONFIG_BYTES = 16 * 2**20
MAX_GROWTH = 256
"""Max product of growth factors; SentencePiece's, the largest in use, is about 130."""
MAX_STEPS = 64
MAX_LITERAL_BYTES = 1024
MAX_ADDED_BYTES = 64 << 20
"""Total of the added tokens, normalized."""
MAX_FRAMING_TOKENS = 64
"""Max special tokens around a text, and max ids of each."""

Step = Mapping[str, Any]


def read_text(path: Path, max_bytes: int) -> str | None:
    """Return the text of `path`, None if missing. Raises ModelError if too large or not UTF-8."""
    if not path.exists():
        return None
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8") from error


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} if missing. Raises ModelError."""
    return read_json_object(path, MAX_CONFIG_BYTES) if path.exists() else {}


@dataclass(frozen=True)
class TokenizerConfig:
    """`tokenizer_config.json` merged with the older `special_tokens_map.json`; both are optional."""

    values: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> TokenizerConfig:
        values = read_json_if_any(directory / TOKENIZER_CONFIG)
        if "added_tokens_decoder" not in values:  # only older folders need the second file, as in Hugging Face
            values |= read_json_if_any(directory / SPECIAL_TOKENS_MAP)
        return cls(values)

    @property
    def named_tokens(self) -> dict[str, str]:
        """Tokens by name ("bos_token"), the variables of chat templates."""
        extra = self.values.get("extra_special_tokens")
        named = {name: value for name, value in self.values.items() if name.endswith("_token")}
        named |= extra if isinstance(extra, dict) else {}
        texts = {name: _content(value) for name, value in named.items()}
        return {name: text for name, text in texts.items() if text}

    @property
    def special_tokens(self) -> set[str]:
        texts = set(self.named_tokens.values())
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = self.values.get(key)
            texts.update(filter(None, map(_content, listed if isinstance(listed, list) else [])))
        decoder = self.values.get("added_tokens_decoder")
        for token in decoder.values() if isinstance(decoder, dict) else []:
            if isinstance(token, dict) and token.get("special") is True:
                texts.add(_content(token) or "")
        return texts - {""}

    @property
    def framing(self) -> tuple[bool, bool] | None:
        """(add BOS, add EOS); None if the post-processor in tokenizer.json decides."""
        if "add_bos_token" not in self.values and "add_eos_token" not in self.values:
            return None
        return bool(self.values.get("add_bos_token")), bool(self.values.get("add_eos_token"))


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def check_growth(file: Mapping[str, Any], source: str) -> float:
    """Check a tokenizer.json; return its normalizer and pre-tokenizer's growth factor. Raises ModelError."""
    try:
        growth = _growth(file, "normalizer", _NORMALIZERS) * _growth(file, "pre_tokenizer", _PRE_TOKENIZERS)
        _growth(file, "decoder", _DECODERS)
        _check_added(file.get("added_tokens") or [], growth)
        for step in _steps(file.get("post_processor"), "post_processor"):
            _check_framing(step)
        if growth > MAX_GROWTH:
            raise _Refused(f"normalizer, pre_tokenizer: lengthen a text {growth:.0f} times ({MAX_GROWTH} at most)")
    except _Refused as error:
        raise ModelError(f"{source}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{source}: not a tokenizer: malformed") from None
    return growth


class _Refused(Exception):
    pass


def _growth(file: Mapping[str, Any], kind: str, factors: Mapping[str, float | Callable[[Step], float]]) -> float:
    growth = 1.0
    for step in _steps(file.get(kind), kind):
        factor = factors.get(step["type"])
        if factor is None:
            raise _Refused(f"{kind}: {str(step['type'])[:40]!r} is not known")
        growth *= max(1.0, factor(step) if callable(factor) else factor)
        if growth > MAX_GROWTH:
            raise _Refused(f"{kind}: lengthens a text more than {MAX_GROWTH} times")
    return growth


def _steps(part: Step | None, kind: str) -> list[Step]:
    steps = list(_flat(part))
    if len(steps) > MAX_STEPS:
        raise _Refused(f"{kind}: has more than {MAX_STEPS} steps")
    return steps


def _flat(part: Step | None) -> Iterator[Step]:
    rest, num_seen = [part], 0
    while rest and num_seen <= 4 * MAX_STEPS:
        step = rest.pop()
        num_seen += 1
        if step is None:
            continue
        if step["type"] == "Sequence":
            (steps,) = (value for name, value in step.items() if name != "type")
            rest.extend(reversed(steps[: 4 * MAX_STEPS]))
            continue
        yield step
    if rest:
        raise _Refused(f"has more than {MAX_STEPS} steps")


def _literal(text: str) -> int:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_LITERAL_BYTES:
        raise _Refused(f"inserts a text of more than {MAX_LITERAL_BYTES} bytes")
    return size


def _replaced(step: Step) -> float:
    new, pattern = _literal(step["content"]), step["pattern"]
    if isinstance(pattern, dict) and pattern.get("String"):
        return new / len(pattern["String"].encode("utf-8", "surrogatepass"))
    return new + 1  # an empty match before each character


def _prepended(step: Step) -> float:
    _literal(step["prepend"])
    return 1


def _precompiled(step: Step) -> float:
    """Return the longest replacement's bytes in SentencePiece's map: trie size, trie, NUL-terminated texts."""
    try:
        data = base64.b64decode(step["precompiled_charsmap"] or "", validate=True)
    except binascii.Error:
        raise _Refused("normalizer: precompiled_charsmap is not base64") from None
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=1)


def _spaced(step: Step) -> float:
    return _literal(step["replacement"])


_NORMALIZERS: Mapping[str, float | Callable[[Step], float]] = {
    "BertNormalizer": 8,
    "ByteLevel": 2,
    "Lowercase": 2,
    "NFC": 3,
    "NFD": 3,
    "NFKC": 12,  # U+FDFA
    "NFKD": 12,
    "Nmt": 1,
    "Precompiled": _precompiled,
    "Prepend": _prepended,
    "Replace": _replaced,
    "Strip": 1,
    "StripAccents": 1,
}
_PRE_TOKENIZERS: Mapping[str, float | Callable[[Step], float]] = {
    **dict.fromkeys(
        ("BertPreTokenizer", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength", "Punctuation", "Split",
         "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
        1,
    ),
    "ByteLevel": 2,
    "Metaspace": _spaced,
}  # fmt: skip
_DECODERS: Mapping[str, float | Callable[[Step], float]] = {
    **dict.fromkeys(("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip", "WordPiece"), 1),
    "Replace": _replaced,
}


def _check_added(tokens: list[Step], growth: float) -> None:
    num_bytes = sum(len(token["content"].encode("utf-8", "surrogatepass")) for token in tokens)
    if num_bytes * math.ceil(growth) > MAX_ADDED_BYTES:
        raise _Refused(f"added_tokens: take more than {MAX_ADDED_BYTES} bytes, normalized")


def _check_framing(step: Step) -> None:
    if step["type"] != "TemplateProcessing":
        return
    for name in ("single", "pair"):
        names = [piece["Sequence"]["id"] for piece in step[name] if "Sequence" in piece]
        if len(set(names)) < len(names):
            raise _Refused(f"post_processor: {name} holds a text twice")
        if len(step[name]) - len(names) > MAX_FRAMING_TOKENS:
            raise _Refused(f"post_processor: {name} has more than {MAX_FRAMING_TOKENS} special tokens")
    if any(len(token["ids"]) > MAX_FRAMING_TOKENS for token in step["special_tokens"].values()):
        raise _Refused(f"post_processor: a special token has more than {MAX_FRAMING_TOKENS} ids")
