"""Log-probabilities as JSON: OpenAI's forms for completions and chats, vLLM's for prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from model.text.detokenizer import Detokenizer
from model.text.tokenizer import Tokenizer
from service.gateway.core.response_assembler import TokenLogprob
from service.gateway.openai.json_objects import Json

LOWEST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class FirstToken:
    """A prompt's first token, which has no log-probability."""

    token_id: int


@dataclass(frozen=True)
class TokenWords:
    """Names of tokens."""

    tokenizer: Tokenizer
    as_ids: bool

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Text offsets of a choice's tokens."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_chars = 0

    def push(self, token_id: int) -> int:
        """Return the next token's offset in characters."""
        begins_at = self._num_chars
        self._num_chars += len(self._detokenizer.push((token_id,)))
        return begins_at


def completion_logprobs(words: TokenWords, entries: Sequence[TokenLogprob | FirstToken], offsets: Offsets) -> Json:
    return {
        "tokens": [words.name(entry.token_id) for entry in entries],
        "token_logprobs": [finite(one.logprob) if isinstance(one, TokenLogprob) else None for one in entries],
        "top_logprobs": [_alternatives(words, one) if isinstance(one, TokenLogprob) else None for one in entries],
        "text_offset": [offsets.push(entry.token_id) for entry in entries],
    }


def _alternatives(words: TokenWords, entry: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(words.name(token), finite(logprob))
    return found


def chat_logprobs(words: TokenWords, entries: Sequence[TokenLogprob], detokenizer: Detokenizer) -> Json:
    return {"content": chat_entries(words, entries, detokenizer), "refusal": None}


def chat_entries(words: TokenWords, entries: Sequence[TokenLogprob], detokenizer: Detokenizer) -> list[Json]:
    """Return the entries of a choice's next tokens.

    All `bytes` joined are the content, so a dropped token has none. `detokenizer` has decoded the preceding tokens.
    """
    return [_chat_entry(words, entry, detokenizer) for entry in entries]


def _chat_entry(words: TokenWords, entry: TokenLogprob, detokenizer: Detokenizer) -> Json:
    top = []
    for token_id, logprob in entry.top:
        data = detokenizer.peek_bytes(token_id)
        top.append(_entry(words, token_id, logprob, words.tokenizer.token_bytes(token_id) if data is None else data))
    data = b"" if entry.is_silent or entry.is_reasoning else detokenizer.push_bytes(entry.token_id)
    return {**_entry(words, entry.token_id, entry.logprob, data), "top_logprobs": top}


def _entry(words: TokenWords, token_id: int, logprob: float, data: bytes) -> Json:
    text = words.tokenizer.token_text(token_id)
    return {"token": words.name(token_id) if words.as_ids else text, "logprob": finite(logprob), "bytes": list(data)}


def prompt_logprobs(words: TokenWords, entries: Sequence[TokenLogprob]) -> list[Json | None]:
    """Return a map from token id to entry per prompt token; None for the first.

    A token outside the top tokens has no rank.
    """
    return [None, *(_ranked(words, entry) for entry in entries)]


def _ranked(words: TokenWords, entry: TokenLogprob) -> Json:
    ranked: list[tuple[int, float, int | None]] = [
        (token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)
    ]
    if all(token != entry.token_id for token, _, _ in ranked):
        ranked.append((entry.token_id, entry.logprob, None))
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": words.name(token)}
        for token, logprob, rank in ranked
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
