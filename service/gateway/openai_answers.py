"""Answers to OpenAI's JSON: whole objects, chunks of a stream, usage, log-probabilities, errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from model.tokenizer import Tokenizer
from service.errors import RequestError
from service.gateway.relay import Outcome, Piece, TokenLogprob

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; the same number as at OpenAI."""

encode_json = msgspec.json.encode


def error_json(error: RequestError) -> Json:
    """OpenAI's error object, as the body of a response or of a stream's last event."""
    return {"error": error_object(error)}


def error_object(error: RequestError) -> Json:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def usage_json(outcome: Outcome) -> Json:
    details = None if outcome.cached_tokens is None else {"cached_tokens": outcome.cached_tokens}
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": details,
    }


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What every object of one answer begins with."""

    job_id: str
    created_s: int
    model: str
    fingerprint: str


class Form(ABC):
    """How one endpoint words an answer."""

    _prefix: str
    _whole_object: str
    _chunk_object: str

    def __init__(self, heading: Heading, tokenizer: Tokenizer, *, logprobs: bool, usage_in_chunks: bool) -> None:
        self._heading = heading
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage_in_chunks = usage_in_chunks

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> Json:
        """The answer as one object."""
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs_json([entry for piece in pieces for entry in piece.logprobs])
        choice = {"index": 0, **self._content(text), "logprobs": logprobs, "finish_reason": outcome.finish_reason}
        return {**self._head(self._whole_object), "choices": [choice], "usage": usage_json(outcome)}

    @abstractmethod
    def opening(self) -> Json | None:
        """The chunk before the first text, if the endpoint has one."""

    def chunk(self, piece: Piece) -> Json:
        return self._chunk(self._delta(piece.text), self._logprobs_json(piece.logprobs), None)

    def closing(self, outcome: Outcome) -> Json:
        """The chunk that says why the answer ends."""
        return self._chunk(self._delta(""), None, outcome.finish_reason)

    def usage(self, outcome: Outcome) -> Json:
        """The last chunk, where the client asked for usage."""
        return {**self._head(self._chunk_object), "choices": [], "usage": usage_json(outcome)}

    def _chunk(self, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": 0, **delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._usage_in_chunks else {}
        return {**self._head(self._chunk_object), "choices": [choice], **usage}

    def _head(self, kind: str) -> Json:
        heading = self._heading
        return {
            "id": self._prefix + heading.job_id,
            "object": kind,
            "created": heading.created_s,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
        }

    @abstractmethod
    def _content(self, text: str) -> Json: ...

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs_json(self, entries: Sequence[TokenLogprob]) -> Json | None: ...


class CompletionForm(Form):
    _prefix = "cmpl-"
    _whole_object = _chunk_object = "text_completion"
    _num_chars = 0  # told so far, for text_offset

    def opening(self) -> None:
        return None

    def _content(self, text: str) -> Json:
        return {"text": text}

    _delta = _content

    def _logprobs_json(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self._logprobs or not entries:
            return None
        texts = [self._text(entry.token_id) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars)
            self._num_chars += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of two that read alike the likelier stays."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._text(token), _finite(logprob))
        return found

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatForm(Form):
    _prefix = "chatcmpl-"
    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def opening(self) -> Json:
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_json(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self._logprobs or not entries:
            return None
        content = [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
