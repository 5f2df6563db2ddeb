"""Builds responses of completions and chats in OpenAI's JSON, whole or as chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from model.text.detokenizer import Detokenizer
from model.text.tokenizer import Tokenizer
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.response_assembler import ChoiceDelta, Outcome, TokenLogprob
from service.gateway.core.served_model import CallOptions, ServedModel
from service.gateway.openai.json_objects import Json, reasoning_json, usage_json, usage_of
from service.gateway.openai.logprobs import (
    FirstToken,
    Offsets,
    TokenWords,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from service.gateway.openai.response_builder import ResponseHeader
from service.gateway.openai.tool_calls import ToolCallWriter


@dataclass(frozen=True, kw_only=True)
class ChoicesOptions:
    """Options of a response, from its request."""

    logprobs: bool = False
    tokens_as_ids: bool = False  # in log-probabilities
    skip_special_tokens: bool = True
    begins_a_text: bool = False  # not continuing a text
    num_choices: int = 1
    prompt_texts: tuple[str, ...] = ()  # echoed before each prompt's choices; empty: no echo
    first_ids: tuple[int, ...] = ()  # the prompts' first ids, if the response has their log-probabilities
    token_ids: bool = False  # include token ids, the prompts' too
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: bool = False  # in vLLM's field; else before those of the output
    usage: bool = False  # in a stream: in a final chunk
    usage_in_chunks: bool = False  # in a stream: the usage so far, in every chunk
    num_prompt_tokens: int = 0
    calls: CallOptions | None = None  # None: no tool calls

    @classmethod
    def of(cls, model: ServedModel, accepted: AcceptedRequest) -> ChoicesOptions:
        request = accepted.request
        return cls(
            logprobs=request.sampling.logprobs is not None,
            tokens_as_ids=request.tokens_as_ids,
            skip_special_tokens=request.hides_special_tokens,
            begins_a_text=request.begins_a_text,
            num_choices=request.num_choices,
            prompt_texts=accepted.prompt_texts,
            first_ids=accepted.first_ids,
            token_ids=request.has_token_ids,
            prompt_ids=accepted.prompt_ids,
            prompt_logprobs=request.has_prompt_logprobs_field,
            usage=request.include_usage,
            usage_in_chunks=request.usage_in_chunks,
            num_prompt_tokens=sum(accepted.num_prompt_tokens),
            calls=model.call_options(request.tools),
        )


class ChoicesBuilder(ABC):
    """Builds a response that consists of choices."""

    _prefix: str
    _whole_object: str
    _chunk_object: str

    def __init__(self, header: ResponseHeader, tokenizer: Tokenizer, options: ChoicesOptions) -> None:
        self._header = header
        self._words = TokenWords(tokenizer, options.tokens_as_ids)
        self._options = options
        self._opened: set[int] = set()  # choices
        self._scored: set[int] = set()  # choices whose prompt log-probabilities were sent
        self._num_tokens = 0  # sent so far in chunks
        self._chunk_head = self._head(self._chunk_object)

    def whole(self, deltas: Sequence[ChoiceDelta], outcome: Outcome) -> Json:
        by_index: dict[int, list[ChoiceDelta]] = {index: [] for index in range(self._options.num_choices)}
        for delta in deltas:
            by_index[delta.index].append(delta)
        # Within a grammar, fewer beams may end than were requested.
        choices = [self._choice(index, own) for index, own in by_index.items() if own]
        return {**self._head(self._whole_object), "choices": choices, "usage": usage_of(outcome)}

    def _choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> Json:
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        entries = [entry for delta in deltas for entry in (*self._of_prompt(delta), *delta.logprobs)]
        logprobs = self._logprobs_json(index, entries)
        content = self._content(index, text, "".join(delta.reasoning for delta in deltas))
        finish_reason = self._finish_reason(index, deltas[-1].finish_reason if deltas else None)
        ids = self._token_ids([token for delta in deltas for token in delta.token_ids])
        ending = {"finish_reason": finish_reason, "stop_reason": deltas[-1].stop if deltas else None}
        return {"index": index, **content, "logprobs": logprobs, **ending, **ids}

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Return the delta's chunks. A choice's first delta also opens the choice."""
        index = delta.index
        chunks: list[Json] = []
        is_first = False
        if index not in self._opened:
            self._opened.add(index)
            opening = self._opening(index)
            if opening is not None:
                logprobs = self._logprobs_json(index, self._of_prompt(delta))
                chunks.append(self._chunk(index, opening, logprobs, None))
            is_first = True
        self._num_tokens += delta.num_tokens
        is_last = delta.finish_reason is not None
        json_deltas = self._json_deltas(index, delta.text, is_last=is_last)
        if delta.reasoning:
            json_deltas.insert(0, {"delta": reasoning_json(delta.reasoning)})
        logprobs = self._logprobs_json(index, delta.logprobs)
        if (logprobs is not None or delta.token_ids) and not json_deltas:
            json_deltas = [self._json_delta("")]
        ids = self._token_ids(delta.token_ids)
        for json_delta in json_deltas:
            chunks.append(self._chunk(index, {**json_delta, **ids}, logprobs, None))
            logprobs, ids = None, {}
        if is_last:
            reason = self._finish_reason(index, delta.finish_reason)
            last = self._chunk(index, self._json_delta(""), None, reason)
            last["choices"][0]["stop_reason"] = delta.stop
            chunks.append(last)
        if is_first and self._options.token_ids:
            self._add_prompt_ids(index, chunks[0])
        return chunks

    def closing(self, outcome: Outcome) -> list[Json]:
        """Return the chunks after the last delta."""
        if not self._options.usage:
            return []
        return [{**self._chunk_head, "choices": [], "usage": usage_of(outcome)}]

    def _chunk(self, index: int, json_delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, **json_delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._options.usage:
            chunk["usage"] = self._usage_so_far()
        return chunk

    def _usage_so_far(self) -> Json | None:
        if not self._options.usage_in_chunks:
            return None
        return usage_json(self._options.num_prompt_tokens, self._num_tokens, None)

    def _head(self, kind: str) -> Json:
        header = self._header
        return {
            "id": self._prefix + header.public_id,
            "object": kind,
            "created": header.created_s,
            "model": header.model,
            "system_fingerprint": header.fingerprint,
        }

    def _echo(self, index: int) -> str:
        texts = self._options.prompt_texts
        return texts[index * len(texts) // self._options.num_choices] if texts else ""

    def _of_prompt(self, delta: ChoiceDelta) -> Sequence[TokenLogprob | FirstToken]:
        """Return the prompt's log-probabilities once per choice."""
        if delta.index in self._scored or not self._options.first_ids or self._options.prompt_logprobs:
            return ()
        self._scored.add(delta.index)
        firsts = self._options.first_ids
        return (FirstToken(firsts[delta.index * len(firsts) // self._options.num_choices]), *delta.prompt_logprobs)

    def _token_ids(self, ids: Sequence[int]) -> Json:
        return {"token_ids": list(ids)} if self._options.token_ids else {}

    def _prompt_ids(self, index: int) -> Json:
        prompts = self._options.prompt_ids
        if not self._options.token_ids:
            return {}
        return {"prompt_token_ids": list(prompts[index * len(prompts) // self._options.num_choices])}

    @abstractmethod
    def _add_prompt_ids(self, index: int, chunk: Json) -> None:
        """Add the prompt's ids to a choice's first chunk."""

    def _prompt_logprobs(self, index: int, deltas: Sequence[ChoiceDelta]) -> Json:
        """Return vLLM's field, null unless requested. Only whole responses have it."""
        if not self._options.prompt_logprobs:
            return {"prompt_logprobs": None}
        scored = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ())
        return {"prompt_logprobs": prompt_logprobs(self._words, scored)}

    @abstractmethod
    def _opening(self, index: int) -> Json | None:
        """Return the JSON delta that opens a choice, if any."""

    def _json_deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        return [self._json_delta(text)] if text else []

    def _finish_reason(self, index: int, word: str | None) -> str | None:
        return word

    @abstractmethod
    def _content(self, index: int, text: str, reasoning: str) -> Json: ...

    @abstractmethod
    def _json_delta(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprob | FirstToken]) -> Json | None: ...


class CompletionBuilder(ChoicesBuilder):
    _prefix = "cmpl-"
    _whole_object = _chunk_object = "text_completion"

    def __init__(self, header: ResponseHeader, tokenizer: Tokenizer, options: ChoicesOptions) -> None:
        super().__init__(header, tokenizer, options)
        self._offsets: dict[int, Offsets] = {}  # by choice

    def _opening(self, index: int) -> Json | None:
        return self._json_delta(self._echo(index)) if self._options.prompt_texts else None

    def _content(self, index: int, text: str, reasoning: str) -> Json:
        return {"text": text}

    def _json_delta(self, text: str) -> Json:
        return {"text": text}

    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprob | FirstToken]) -> Json | None:
        if not self._options.logprobs or not entries:
            return None
        if index not in self._offsets:
            skip, is_echo = self._options.skip_special_tokens, bool(self._options.prompt_texts)
            self._offsets[index] = Offsets(self._words.tokenizer.detokenizer(skip, at_start=is_echo))
        return completion_logprobs(self._words, entries, self._offsets[index])

    def _choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> Json:
        return {**super()._choice(index, deltas), **self._prompt_logprobs(index, deltas), **self._prompt_ids(index)}

    def _add_prompt_ids(self, index: int, chunk: Json) -> None:
        chunk["choices"][0] |= self._prompt_ids(index)


class ChatBuilder(ChoicesBuilder):
    _prefix = "chatcmpl-"
    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, header: ResponseHeader, tokenizer: Tokenizer, options: ChoicesOptions) -> None:
        super().__init__(header, tokenizer, options)
        self._calls = None if options.calls is None else ToolCallWriter(header.request_id, options.calls)
        self._detokenizers: dict[int, Detokenizer] = {}  # by choice, for log-probabilities

    def _opening(self, index: int) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _content(self, index: int, text: str, reasoning: str) -> Json:
        content: Json = {"content": text} if self._calls is None else self._calls.message(index, text)
        if reasoning:
            content |= {"content": content["content"] or None, **reasoning_json(reasoning)}
        return {"message": {"role": "assistant", **content, "refusal": None}}

    def _json_deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        if self._calls is None:
            return super()._json_deltas(index, text, is_last=is_last)
        return [{"delta": json_delta} for json_delta in self._calls.json_deltas(index, text, is_last=is_last)]

    def _finish_reason(self, index: int, word: str | None) -> str | None:
        return word if self._calls is None else self._calls.finish_reason(index, word)

    def _json_delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_json(self, index: int, entries: Sequence[TokenLogprob | FirstToken]) -> Json | None:
        if not self._options.logprobs or not entries:
            return None
        if index not in self._detokenizers:
            options = self._options
            self._detokenizers[index] = self._words.tokenizer.detokenizer(
                options.skip_special_tokens, at_start=options.begins_a_text
            )
        generated = [entry for entry in entries if isinstance(entry, TokenLogprob)]
        return chat_logprobs(self._words, generated, self._detokenizers[index])

    def whole(self, deltas: Sequence[ChoiceDelta], outcome: Outcome) -> Json:
        return {**super().whole(deltas, outcome), **self._prompt_logprobs(0, deltas), **self._prompt_ids(0)}

    def _add_prompt_ids(self, index: int, chunk: Json) -> None:
        if index == 0:
            chunk |= self._prompt_ids(0)


def choices_builder_of(model: ServedModel, accepted: AcceptedRequest) -> ChoicesBuilder:
    """Return the builder for a completion or chat."""
    header, options = ResponseHeader.of(model, accepted), ChoicesOptions.of(model, accepted)
    return (ChatBuilder if accepted.request.is_chat else CompletionBuilder)(header, model.tokenizer, options)
