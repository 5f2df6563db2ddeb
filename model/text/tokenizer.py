"""Encodes and decodes text by `tokenizer.json`; user text never becomes a control token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import tokenizers

from model.errors import ModelError
from model.json_files import parse_json_object
from model.text.detokenizer import Detokenizer
from model.text.tokenizer_files import TokenizerConfig, check_growth, read_text
from model.text.vocabulary import Vocabulary

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_NORMALIZED_BYTES = 256 << 20
MAX_REASON_CHARS = 300
UNKNOWN_CHARACTER = "\U0010ffff"  # a noncharacter, in no vocabulary
NO_PLACEHOLDERS: Mapping[str, str] = MappingProxyType({})


class Tokenizer:
    """A model's tokenizer. Immutable and thread-safe."""

    @classmethod
    def read(cls, directory: Path) -> Tokenizer:
        """Load `tokenizer.json` and its companions. Raises ModelError."""
        path = directory / TOKENIZER_FILE
        text = read_text(path, MAX_TOKENIZER_BYTES)
        if text is None:
            raise ModelError(f"{directory} has no {TOKENIZER_FILE}")
        growth = check_growth(parse_json_object(text.encode(), str(path)), str(path))
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing narrower; its panics are not Exceptions
            raise ModelError(f"{path}: not a tokenizer: {_first_line(error)}") from error
        return cls(backend, TokenizerConfig.read(directory), growth)

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig, growth: float = 1.0) -> None:
        """Take over and modify `backend`. `growth` bounds the length ratio of normalized to original text."""
        backend.no_truncation()
        backend.no_padding()
        specials = _mark_specials(backend, config)
        self.named_tokens = config.named_tokens
        self.special_tokens = frozenset(specials)
        self.special_ids = frozenset(specials.values())
        self._special_id_by_text = specials
        self._vocabulary = Vocabulary(backend, self.special_ids)
        self.longest_token_bytes = max(map(len, self._vocabulary.pieces))
        self._frame = _read_frame(backend, config)
        self._secret_spellings = _add_secret_spellings(backend, specials)
        self._special_by_secret = {spelling: specials[token] for token, spelling in self._secret_spellings.items()}
        self._special_pattern = any_of(specials)
        self._spellings = _spell_out(backend, specials)
        backend.encode_special_tokens = True
        self._backend = backend
        self._max_text_chars = int(MAX_NORMALIZED_BYTES / growth)

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = False) -> list[int]:
        """Encode a prompt, with BOS and other framing if `add_special_tokens`.

        Special tokens in `text` are plain text, unless `parse_special`; a leading BOS is then not repeated. Raises
        ValueError if the text is too long or has a lone surrogate or a character without a token.
        """
        if parse_special and self._special_pattern.search(text):
            return self._encode_marked(text, add_special_tokens)
        encoding = self._encode(text, add_special_tokens and self._frame is None)
        ids = encoding.ids
        if not self._spellings.keys().isdisjoint(ids):
            pairs = zip(ids, encoding.special_tokens_mask, strict=True)
            ids = [j for i, is_frame in pairs for j in ([i] if is_frame else self._spellings.get(i, [i]))]
        before, after = (self._frame if add_special_tokens else None) or ([], [])
        return [*before, *ids, *after]

    def encode_template(self, rendered: str, placeholders: Mapping[str, str] = NO_PLACEHOLDERS) -> list[int]:
        """Encode a rendered chat template; recognises special tokens and adds no framing.

        `placeholders` maps placeholders to the user's characters. Raises ValueError like `encode`.
        """
        respelt = self._special_pattern.sub(lambda match: self._secret_spellings[match[0]], rendered)
        if placeholders:
            originals: dict[str, str | int | None] = {**placeholders}
            respelt = respelt.translate(str.maketrans(originals))
        encoding = self._encode(respelt, add_special_tokens=False)
        ids: list[int] = []
        # Compare texts, not ids: where the file's ids have gaps, the library reuses other tokens' ids.
        for token, token_id in zip(encoding.tokens, encoding.ids, strict=True):
            special = self._special_by_secret.get(token.strip())
            ids += self._spellings.get(token_id, [token_id]) if special is None else [special]
        return ids

    def token_id(self, text: str) -> int | None:
        """Look up a token's id by its text in tokenizer.json."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def special_id(self, text: str) -> int | None:
        return self._special_id_by_text.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for an unknown id."""
        return self._vocabulary.pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, at_start: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens, at_start)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(
        self, skip_special_tokens: bool = True, at_start: bool = False, shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a new detokenizer; `at_start` drops the space that the tokenizer puts before the first word.

        Special tokens in `shown_ids` are not skipped.
        """
        return self._vocabulary.detokenizer(skip_special_tokens, at_start, shown_ids)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Framing ids before and after a text."""
        if self._frame is not None:
            return self._frame
        encoding = self._encode("a", add_special_tokens=True)
        own = [index for index, is_frame in enumerate(encoding.special_tokens_mask) if not is_frame]
        return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]

    def _encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self.encode_template(text)
        before, after = self._ends if add_special_tokens else ([], [])
        return [*([] if ids[: len(before)] == before else before), *ids, *after]

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) > self._max_text_chars:
            raise ValueError("the text is too long for the tokenizer")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # not UTF-8
            raise ValueError("the text holds a lone surrogate") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic is not an Exception
            raise ValueError("the tokenizer has no token for some of the text") from error


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of `texts`; without texts, it never matches."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _mark_specials(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> dict[str, int]:
    """Mark the configured special tokens in `backend`; return all special ids by text.

    An ordinary pad token ("!") stays ordinary, or it would vanish from answers.
    """
    added = backend.get_added_tokens_decoder()
    own = {token.content for token in added.values()}
    ends = {config.named_tokens.get(name) for name in ("bos_token", "eos_token")}
    wanted = [text for text in sorted(config.special_tokens) if text in own or text in ends]
    known = {text: i for text in wanted if (i := backend.token_to_id(text)) is not None}
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
    flagged = {token.content: token_id for token_id, token in added.items() if token.special}
    return flagged | known


def _spell_out(backend: tokenizers.Tokenizer, specials: Mapping[str, int]) -> dict[int, list[int]]:
    """Spell out each special token that a Unigram model can produce from plain text, except the unknown one."""
    own = backend.get_vocab(with_added_tokens=False)
    special_ids = set(specials.values())
    unknown_ids = set(_model_ids(backend, UNKNOWN_CHARACTER))
    spellings = {}
    for token, token_id in specials.items():
        if token in own and token_id not in unknown_ids:
            ids = [i for letter in token for i in _model_ids(backend, letter)]
            spellings[token_id] = [i for i in ids if i not in special_ids or i in unknown_ids]
    return spellings


def _model_ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return [token.id for token in backend.model.tokenize(text)]
    except Exception:  # the library raises nothing narrower
        return []


def _read_frame(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> tuple[list[int], list[int]] | None:
    if config.framing is None:
        return None
    ends = [config.named_tokens.get(name) for name in ("bos_token", "eos_token")]
    ids = [None if text is None else backend.token_to_id(text) for text in ends]
    before, after = ([i] if wanted and i is not None else [] for wanted, i in zip(config.framing, ids, strict=True))
    return before, after


def _add_secret_spellings(backend: tokenizers.Tokenizer, specials: Mapping[str, int]) -> dict[str, str]:
    """Add a secret spelling of each special token for templates, random per process, so that users cannot write it."""
    secret = secrets.token_hex(16)
    spellings = {text: f"<{secret}:{token_id}>" for text, token_id in specials.items()}
    flags = backend.get_added_tokens_decoder()
    backend.add_tokens(
        [
            tokenizers.AddedToken(
                spellings[text],
                lstrip=flags[token_id].lstrip,
                rstrip=flags[token_id].rstrip,
                single_word=flags[token_id].single_word,
                normalized=False,
            )
            for text, token_id in specials.items()
        ]
    )
    return spellings
