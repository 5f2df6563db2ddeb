"""Size-limited reading of a model folder's text files, and the special tokens that its configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.json_files import read_bytes, read_json_object

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
MAX_CONFIG_BYTES = 16 * 2**20


def read_text(path: Path, max_bytes: int) -> str | None:
    """Return the text of `path`, or None if it does not exist. Raises ModelError if it is too large or not UTF-8."""
    if not path.exists():
        return None
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8") from error


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} if it does not exist. Raises ModelError for anything else."""
    return read_json_object(path, MAX_CONFIG_BYTES) if path.exists() else {}


@dataclass(frozen=True)
class TokenizerConfig:
    """`tokenizer_config.json` merged with the older `special_tokens_map.json`; both are optional."""

    values: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> TokenizerConfig:
        """Read a model folder's files. Raises ModelError if one is unreadable or not a JSON object."""
        values = read_json_if_any(directory / TOKENIZER_CONFIG)
        if "added_tokens_decoder" not in values:  # as in Hugging Face, only older folders need the second file
            values |= read_json_if_any(directory / SPECIAL_TOKENS_MAP)
        return cls(values)

    @property
    def named_tokens(self) -> dict[str, str]:
        """Tokens by name, such as "bos_token"; chat templates see them as variables."""
        extra = self.values.get("extra_special_tokens")
        named = {name: value for name, value in self.values.items() if name.endswith("_token")}
        named |= extra if isinstance(extra, dict) else {}
        texts = {name: _content(value) for name, value in named.items()}
        return {name: text for name, text in texts.items() if text}

    @property
    def special_tokens(self) -> set[str]:
        """Every token that these files call special, named or not."""
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
    """Return the text of a token, written as a string or a serialised AddedToken; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
