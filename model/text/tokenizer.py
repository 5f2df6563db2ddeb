"""Text to token ids and back, as `tokenizer.json` says, but what a user wrote never becomes a control token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from model.errors import ModelError
from model.json_files import parse_json_object
from model.text.detokenizer import Detokenizer
from model.text.tokenizer_files import TokenizerConfig, read_text
from model.text.tokenizer_growth import check_growth
from model.text.vocabulary import Vocabulary

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_NORMALIZED_BYTES = 256 << 20
"""Of a text, in the worst case."""
MAX_REASON_CHARS = 300
UNKNOWN_CHARACTER = "\U0010ffff"  # a noncharacter: no vocabulary has it
NO_STAND_INS: Mapping[str, str] = MappingProxyType({})


class Tokenizer:
    """The tokenizer of a model folder. Immutable once read, so any number of threads may use it."""

    @classmethod
    def read(cls, directory: Path) -> Tokenizer:
        """Reads `tokenizer.json` and what stands beside it. ModelError if there is none or it is no tokenizer."""
        path = directory / TOKENIZER_FILE
        text = read_text(path, MAX_TOKENIZER_BYTES)
        if text is None:
            raise ModelError(f"{directory} has no {TOKENIZER_FILE}")
        growth = check_growth(parse_json_object(text.encode(), str(path)), str(path))
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing narrower, and a panic of it is no Exception
            raise ModelError(f"{path} is no tokenizer: {_first_line(error)}") from error
        return cls(backend, TokenizerConfig.read(directory), growth)

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig, growth: float = 1.0) -> None:
        """Takes `backend` over and changes it. `growth`: how much longer it may make a text."""
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
        self._guards = _add_guards(backend, specials)
        self._special_by_guard = {guard: specials[token] for token, guard in self._guards.items()}
        self._special_pattern = any_of(specials)
        self._spellings = _spell_out(backend, specials)
        backend.encode_special_tokens = True
        self._backend = backend
        self._max_text_chars = int(MAX_NORMALIZED_BYTES / growth)

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to one less than this; a few of them may stand for no token."""
        return self._vocabulary.size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, with BOS or what else the model puts around one. Special tokens spelt in it are plain text.

        ValueError if `text` holds a lone surrogate.
        """
        encoding = self._encode(text, add_special_tokens and self._frame is None)
        ids = encoding.ids
        if not self._spellings.keys().isdisjoint(ids):
            pairs = zip(ids, encoding.special_tokens_mask, strict=True)
            ids = [j for i, is_frame in pairs for j in ([i] if is_frame else self._spellings.get(i, [i]))]
        before, after = (self._frame if add_special_tokens else None) or ([], [])
        return [*before, *ids, *after]

    def encode_template(self, rendered: str, stand_ins: Mapping[str, str] = NO_STAND_INS) -> list[int]:
        """Ids of a rendered chat template, in which special tokens are what they say and nothing is put around.

        `stand_ins` maps each character that stands in `rendered` for another, so that user text spells no special
        token, back to that other. ValueError if `rendered` holds a lone surrogate.
        """
        guarded = self._special_pattern.sub(lambda match: self._guards[match[0]], rendered)
        if stand_ins:
            guarded = guarded.translate(str.maketrans(dict(stand_ins)))
        encoding = self._encode(guarded, add_special_tokens=False)
        ids: list[int] = []
        # By text, for the library gives guards the ids of other tokens where the file's ids have gaps.
        for token, token_id in zip(encoding.tokens, encoding.ids, strict=True):
            special = self._special_by_guard.get(token.strip())
            ids += self._spellings.get(token_id, [token_id]) if special is None else [special]
        return ids

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelt so, if there is one."""
        return self._special_id_by_text.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; empty for an id that is not in the vocabulary."""
        return self._vocabulary.pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text; those that are no UTF-8 alone become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, at_start: bool = True) -> str:
        """The text of `ids`, which `detokenizer` gives in parts."""
        detokenizer = self.detokenizer(skip_special_tokens, at_start)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True, at_start: bool = False) -> Detokenizer:
        """A fresh stream of ids to text. `at_start` says that the text begins here, where many tokenizers drop the
        space before the first word; otherwise it continues another text and keeps that space.
        """
        return self._vocabulary.detokenizer(skip_special_tokens, at_start)

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) > self._max_text_chars:
            raise ValueError("the text is too long for the tokenizer")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # the library's word for a string that has no UTF-8
            raise ValueError("the text holds a lone surrogate, which is no character") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise ValueError("the tokenizer has no token for some of the text") from error


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `texts`; of none, it matches nowhere."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _mark_specials(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> dict[str, int]:
    """Ids of all special tokens by text, once `backend` knows those that only the configuration calls special.

    A token that only the configuration names and that the model has as ordinary text (a pad token "!") stays ordinary:
    it would vanish from every answer. BOS and EOS are special in any case.
    """
    added = backend.get_added_tokens_decoder()
    own = {token.content for token in added.values()}
    ends = {config.named_tokens.get(name) for name in ("bos_token", "eos_token")}
    wanted = [text for text in sorted(config.special_tokens) if text in own or text in ends]
    known = [text for text in wanted if backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
    flagged = {token.content: token_id for token_id, token in added.items() if token.special}
    return flagged | {text: backend.token_to_id(text) for text in known}


def _spell_out(backend: tokenizers.Tokenizer, specials: Mapping[str, int]) -> dict[int, list[int]]:
    """For each special token that the model itself may find in plain text, as Unigram does, ids that spell it.

    The token for unknown characters is not among them: it controls nothing.
    """
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
    """Ids that the model alone gives `text`; none where it knows neither the text nor a token for the unknown."""
    try:
        return [token.id for token in backend.model.tokenize(text)]
    except Exception:  # the library raises nothing narrower
        return []


def _read_frame(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> tuple[list[int], list[int]] | None:
    """Ids before and after every prompt, where the configuration overrules the post-processor of `backend`."""
    if config.framing is None:
        return None
    ends = [config.named_tokens.get(name) for name in ("bos_token", "eos_token")]
    ids = [None if text is None else backend.token_to_id(text) for text in ends]
    before, after = ([i] if wanted and i is not None else [] for wanted, i in zip(config.framing, ids, strict=True))
    return before, after


def _add_guards(backend: tokenizers.Tokenizer, specials: Mapping[str, int]) -> dict[str, str]:
    """Gives each special token a second, secret spelling that is read even where special tokens are not.

    A template's own special tokens are respelt so. The spelling is drawn anew in each process, so no user can write it.
    """
    secret = secrets.token_hex(16)
    guards = {text: f"<{secret}:{token_id}>" for text, token_id in specials.items()}
    flags = backend.get_added_tokens_decoder()
    backend.add_tokens(
        [
            tokenizers.AddedToken(
                guards[text],
                lstrip=flags[token_id].lstrip,
                rstrip=flags[token_id].rstrip,
                single_word=flags[token_id].single_word,
                normalized=False,
            )
            for text, token_id in specials.items()
        ]
    )
    return guards
