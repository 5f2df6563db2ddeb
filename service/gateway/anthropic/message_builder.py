"""Builds responses of Anthropic's `/v1/messages`: messages, stream events, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.anthropic.messages_body import NO_THREADS
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.refusals import CONTEXT_LENGTH_EXCEEDED
from service.gateway.core.response_assembler import ChoiceDelta, Outcome
from service.gateway.core.served_model import CallOptions, ServedModel
from service.gateway.openai.json_objects import Json
from service.gateway.openai.tool_calls import ToolCallWriter

MESSAGE_PREFIX = "msg_"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by HTTP status; otherwise invalid_request_error or api_error."""


def error_json(error: RequestError, request_id: str | None = None) -> Json:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Claude Code compacts its conversation after an error with these words.
    prefix = "prompt is too long: " if error.code == CONTEXT_LENGTH_EXCEEDED else ""
    described: Json = {"type": kind, "message": prefix + error.message}
    if error.code == NO_THREADS:
        described["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": described, "request_id": request_id}


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    request_id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    is_streamed: bool
    calls: CallOptions | None  # None: no tool calls

    @classmethod
    def of(cls, model: ServedModel, accepted: AcceptedRequest) -> MessageOptions:
        return cls(
            request_id=accepted.request_id,
            model=model.answer_name(accepted.request.model),
            num_prompt_tokens=sum(accepted.num_prompt_tokens),
            max_tokens=accepted.request.sampling.max_tokens or 0,
            is_streamed=accepted.request.stream,
            calls=model.call_options(accepted.request.tools),
        )


class MessageBuilder:
    """Builds one message. The same deltas give the same events in every gateway."""

    def __init__(self, options: MessageOptions) -> None:
        self._options = options
        calls = options.calls
        self._calls = (
            None if calls is None else ToolCallWriter(options.request_id, calls, is_streamed=options.is_streamed)
        )
        self._content: list[Json] = []
        self._arguments = ""  # of the open tool_use
        self._is_open = False  # the last content block
        self._is_begun = False
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    def whole(self, deltas: Sequence[ChoiceDelta], outcome: Outcome) -> Json:
        for delta in deltas:
            self.chunks(delta)
        self._close()
        return {**self._message(), **self._ending(outcome), "usage": _usage(outcome)}

    def opening(self) -> list[Json]:
        """Return the events before the first delta, once."""
        if self._is_begun:
            return []
        self._is_begun = True
        usage = {"input_tokens": self._options.num_prompt_tokens, "output_tokens": 0}
        message = {**self._message(), **self._end, "usage": {**usage, **_CACHE_USAGE}}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Return the delta's events."""
        events = self.opening()
        is_last = delta.finish_reason is not None
        if delta.reasoning:
            events += self._open_as("thinking", {"thinking": "", "signature": ""})
            self._content[-1]["thinking"] += delta.reasoning
            events.append(self._delta("thinking_delta", thinking=delta.reasoning))
        for json_delta in self._json_deltas(delta.text, is_last=is_last):
            if "tool_calls" in json_delta:
                for call in json_delta["tool_calls"]:
                    events += self._call(call)
            else:
                events += self._open_as("text", {"text": ""})
                self._content[-1]["text"] += json_delta["content"]
                events.append(self._delta("text_delta", text=json_delta["content"]))
        if is_last:
            has_called = any(part["type"] == "tool_use" for part in self._content)
            self._end = {"stop_reason": STOP_REASONS.get(delta.finish_reason or ""), "stop_sequence": delta.stop}
            if delta.stop is not None:
                self._end["stop_reason"] = "stop_sequence"
            elif has_called and delta.finish_reason == "stop":
                self._end["stop_reason"] = "tool_use"
        return events

    def closing(self, outcome: Outcome) -> list[Json]:
        """Return the events after the last delta."""
        events = [*self.opening(), *self._close()]
        return [
            *events,
            {"type": "message_delta", "delta": self._ending(outcome), "usage": _usage(outcome)},
            {"type": "message_stop"},
        ]

    def _ending(self, outcome: Outcome) -> Json:
        if self._end["stop_reason"] == "max_tokens" and outcome.completion_tokens < self._options.max_tokens:
            return {**self._end, "stop_reason": "model_context_window_exceeded"}
        return self._end

    def _json_deltas(self, text: str, *, is_last: bool) -> list[Json]:
        if self._calls is not None:
            return self._calls.json_deltas(0, text, is_last=is_last)
        return [{"content": text}] if text else []

    def _call(self, call: Json) -> list[Json]:
        events: list[Json] = []
        function = call["function"]
        if "id" in call:
            events += self._open("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
        if function["arguments"]:
            self._arguments += function["arguments"]
            events.append(self._delta("input_json_delta", partial_json=function["arguments"]))
        return events

    def _open_as(self, kind: str, part: Json) -> list[Json]:
        if self._is_open and self._content[-1]["type"] == kind:
            return []
        return self._open(kind, part)

    def _open(self, kind: str, part: Json) -> list[Json]:
        events = self._close()
        self._content.append({"type": kind, **part})
        self._is_open, self._arguments = True, ""
        begun = msgspec.to_builtins(self._content[-1])
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": begun}]

    def _close(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        part, events = self._content[-1], []
        if part["type"] == "thinking":
            part["signature"] = f"quire-{self._options.request_id}"  # clients expect a signature; nothing checks it
            events.append(self._delta("signature_delta", signature=part["signature"]))
        if part["type"] == "tool_use" and not self._options.is_streamed:
            part["input"] = msgspec.json.decode(self._arguments or "{}")
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]

    def _delta(self, kind: str, **fields: Any) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": {"type": kind, **fields}}

    def _message(self) -> Json:
        return {
            "id": MESSAGE_PREFIX + self._options.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": msgspec.to_builtins(self._content),
        }


_CACHE_USAGE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(outcome: Outcome) -> Json:
    """Return the usage. As at Anthropic, `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": outcome.prompt_tokens - outcome.cached_tokens,
        "output_tokens": outcome.completion_tokens,
        **_CACHE_USAGE,
        "cache_read_input_tokens": outcome.cached_tokens,
    }


def message_builder_of(model: ServedModel, accepted: AcceptedRequest) -> MessageBuilder:
    return MessageBuilder(MessageOptions.of(model, accepted))
