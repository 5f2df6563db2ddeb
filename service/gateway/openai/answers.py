"""Answers to OpenAI's JSON: whole objects, chunks of a stream, usage, log-probabilities, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from model.text.detokenizer import Detokenizer
from model.text.tokenizer import Tokenizer
from service.errors import RequestError
from service.gateway.generation.response_assembler import Piece, TokenLogprob
from service.gateway.generation.response_stream import Outcome
from service.gateway.generation.served_model import CallWording
from service.gateway.openai.calls import CallTeller
from service.gateway.openai.logprobs import (
    FirstToken,
    Offsets,
    TokenWords,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

Json = dict[str, Any]

encode_json = msgspec.json.encode


def error_json(error: RequestError) -> Json:
    """OpenAI's error object, as the body of a response or of a stream's last event."""
    return {"error": error_object(error)}


def error_object(error: RequestError) -> Json:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def usage_json(outcome: Outcome) -> Json:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
    }


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What every object of one answer begins with."""

    job_id: str
    created_s: int
    model: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Wording:
    """What a client may choose of an answer's form."""

    logprobs: bool = False
    tokens_as_ids: bool = False  # in log-probabilities
    skip_special_tokens: bool = True
    begins_a_text: bool = False  # the answer is a text of its own, and not the rest of another
    num_choices: int = 1
    prompt_texts: tuple[str, ...] = ()  # told before the choices of each prompt; none: not wanted
    first_ids: tuple[int, ...] = ()  # of the prompts, where the log-probabilities of their others are told
    prompt_logprobs: bool = False  # told of the prompts in a field of their own; else before those of the answer
    usage: bool = False  # of a stream: in a last chunk of its own
    usage_in_chunks: bool = False  # of a stream: so far, in every chunk
    num_prompt_tokens: int = 0
    calls: CallWording | None = None  # None: the answer calls nothing


class AnswerForm(Protocol):
    """How any answer is worded. One object words one answer, from its first piece to its last."""

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> Json: ...

    def chunks(self, piece: Piece) -> list[Json]: ...

    def closing(self, outcome: Outcome) -> list[Json]: ...


class Form(ABC):
    """An answer that is made of choices."""

    _prefix: str
    _whole_object: str
    _chunk_object: str

    def __init__(self, heading: Heading, tokenizer: Tokenizer, wording: Wording) -> None:
        self._heading = heading
        self._words = TokenWords(tokenizer, wording.tokens_as_ids)
        self._wording = wording
        self._opened: set[int] = set()  # choices
        self._scored: set[int] = set()  # choices whose prompts' log-probabilities are told
        self._num_tokens = 0  # told of in chunks so far
        self._chunk_head = self._head(self._chunk_object)

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> Json:
        """The answer as one object."""
        by_index: dict[int, list[Piece]] = {index: [] for index in range(self._wording.num_choices)}
        for piece in pieces:
            by_index[piece.index].append(piece)
        # Of beams in a grammar there may be fewer that end than were asked for.
        choices = [self._choice(index, said) for index, said in by_index.items() if said]
        return {**self._head(self._whole_object), "choices": choices, "usage": usage_json(outcome)}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        text = self._echo(index) + "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces for entry in (*self._of_prompt(piece), *piece.logprobs)]
        logprobs = self._logprobs_json(index, entries)
        content = self._content(index, text)
        finish_reason = self._finish_reason(index, pieces[-1].finish_reason if pieces else None)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def chunks(self, piece: Piece) -> list[Json]:
        """The chunks of a stream that tell `piece`; a choice's first brings those that open it."""
        index = piece.index
        chunks = []
        if index not in self._opened:
            self._opened.add(index)
            opening = self._opening(index)
            if opening is not None:
                logprobs = self._logprobs_json(index, self._of_prompt(piece))
                chunks.append(self._chunk(index, opening, logprobs, None))
        self._num_tokens += piece.num_tokens
        is_last = piece.finish_reason is not None
        deltas = self._deltas(index, piece.text, is_last=is_last)
        logprobs = self._logprobs_json(index, piece.logprobs)
        if logprobs is not None and not deltas:
            deltas = [self._delta("")]
        for delta in deltas:
            chunks.append(self._chunk(index, delta, logprobs, None))
            logprobs = None
        if is_last:
            reason = self._finish_reason(index, piece.finish_reason)
            chunks.append(self._chunk(index, self._delta(""), None, reason))
        return chunks

    def closing(self, outcome: Outcome) -> list[Json]:
        """What follows the last piece."""
        if not self._wording.usage:
            return []
        return [{**self._chunk_head, "choices": [], "usage": usage_json(outcome)}]

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._wording.usage:
            chunk["usage"] = self._usage_so_far()
        return chunk

    def _usage_so_far(self) -> Json | None:
        if not self._wording.usage_in_chunks:
            return None
        return usage_json(Outcome(self._wording.num_prompt_tokens, self._num_tokens, None))

    def _head(self, kind: str) -> Json:
        heading = self._heading
        return {
            "id": self._prefix + heading.job_id,
            "object": kind,
            "created": heading.created_s,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
        }

    def _echo(self, index: int) -> str:
        """The text of the choice's prompt, where it is wanted."""
        texts = self._wording.prompt_texts
        return texts[index * len(texts) // self._wording.num_choices] if texts else ""

    def _of_prompt(self, piece: Piece) -> Sequence[TokenLogprob | FirstToken]:
        """How likely the tokens of the choice's prompt were, in its first piece, where that is wanted."""
        if piece.index in self._scored or not self._wording.first_ids or self._wording.prompt_logprobs:
            return ()
        self._scored.add(piece.index)
        firsts = self._wording.first_ids
        return (FirstToken(firsts[piece.index * len(firsts) // self._wording.num_choices]), *piece.prompt_logprobs)

    def _prompt_logprobs(self, index: int, pieces: Sequence[Piece]) -> Json:
        """vLLM's field for them, null unless it is wanted; it goes with whole answers only."""
        if not self._wording.prompt_logprobs:
            return {"prompt_logprobs": None}
        scored = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs), ())
        return {"prompt_logprobs": prompt_logprobs(self._words, scored)}

    @abstractmethod
    def _opening(self, index: int) -> Json | None:
        """What a choice says before its first text, if anything."""

    def _deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        return [self._delta(text)] if text else []

    def _finish_reason(self, index: int, word: str | None) -> str | None:
        return word

    @abstractmethod
    def _content(self, index: int, text: str) -> Json: ...

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprob | FirstToken]) -> Json | None: ...


class CompletionForm(Form):
    _prefix = "cmpl-"
    _whole_object = _chunk_object = "text_completion"

    def __init__(self, heading: Heading, tokenizer: Tokenizer, wording: Wording) -> None:
        super().__init__(heading, tokenizer, wording)
        self._offsets: dict[int, Offsets] = {}  # of each choice

    def _opening(self, index: int) -> Json | None:
        return self._delta(self._echo(index)) if self._wording.prompt_texts else None

    def _content(self, index: int, text: str) -> Json:
        return {"text": text}

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprob | FirstToken]) -> Json | None:
        if not self._wording.logprobs or not entries:
            return None
        if index not in self._offsets:
            skip, is_echo = self._wording.skip_special_tokens, bool(self._wording.prompt_texts)
            self._offsets[index] = Offsets(self._words.tokenizer.detokenizer(skip, at_start=is_echo))
        return completion_logprobs(self._words, entries, self._offsets[index])

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        return {**super()._choice(index, pieces), **self._prompt_logprobs(index, pieces)}


class ChatForm(Form):
    _prefix = "chatcmpl-"
    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, heading: Heading, tokenizer: Tokenizer, wording: Wording) -> None:
        super().__init__(heading, tokenizer, wording)
        self._calls = None if wording.calls is None else CallTeller(heading.job_id, wording.calls)
        self._detokenizers: dict[int, Detokenizer] = {}  # of each choice, for log-probabilities

    def _opening(self, index: int) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _content(self, index: int, text: str) -> Json:
        said = {"content": text} if self._calls is None else self._calls.message(index, text)
        return {"message": {"role": "assistant", **said, "refusal": None}}

    def _deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        if self._calls is None:
            return super()._deltas(index, text, is_last=is_last)
        return [{"delta": delta} for delta in self._calls.deltas(index, text, is_last=is_last)]

    def _finish_reason(self, index: int, word: str | None) -> str | None:
        return word if self._calls is None else self._calls.finish_reason(index, word)

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self._wording.logprobs or not entries:
            return None
        if index not in self._detokenizers:
            wording = self._wording
            self._detokenizers[index] = self._words.tokenizer.detokenizer(
                wording.skip_special_tokens, at_start=wording.begins_a_text
            )
        return chat_logprobs(self._words, entries, self._detokenizers[index])

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> Json:
        return {**super().whole(pieces, outcome), **self._prompt_logprobs(0, pieces)}
