"""Builds responses of `/v1/responses`: the response object and the stream's events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from model.text.tokenizer import Tokenizer
from service.errors import EndReason, RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.response_assembler import ChoiceDelta, Outcome
from service.gateway.core.served_model import CallOptions, ServedModel
from service.gateway.openai.json_objects import Json, prediction_json
from service.gateway.openai.logprobs import TokenWords, chat_entries
from service.gateway.openai.response_builder import ResponseHeader
from service.gateway.openai.responses.body import ResponseBody, ResponseTool
from service.gateway.openai.responses.reasoning_items import ReasoningForm
from service.gateway.openai.responses.request_reader import read_response_body
from service.gateway.openai.tool_calls import ToolCallWriter

RESPONSE_PREFIX = "resp_"


@dataclass(frozen=True, kw_only=True)
class ResponsesOptions:
    """Fields of a response that depend on its request."""

    echoed: Mapping[str, Any]  # the request's fields, or their defaults
    is_background: bool
    is_streamed: bool
    logprobs: bool
    calls: CallOptions | None  # None: no tool calls
    namespaces: Mapping[str, tuple[str, str]]  # function's (namespace, name), by the name shown to the model
    reasoning: ReasoningForm

    @classmethod
    def of(cls, model: ServedModel, accepted: AcceptedRequest) -> ResponsesOptions:
        request = accepted.request
        body = read_response_body(msgspec.json.decode(request.source.outline))
        return cls(
            echoed={
                **_echoed(body),
                "temperature": float(_or(body.temperature, model.defaults.get("temperature", 1.0))),
                "top_p": float(_or(body.top_p, model.defaults.get("top_p", 1.0))),
            },
            is_background=request.background,
            is_streamed=request.stream,
            logprobs=request.sampling.logprobs is not None,
            calls=model.call_options(request.tools),
            namespaces={tool.full_name: (tool.namespace, tool.name) for tool in body.tools if tool.namespace},
            reasoning=ReasoningForm.of(body.reasoning, body.include),
        )


def _echoed(body: ResponseBody) -> Json:
    default_choice = "auto" if body.tools else "none"
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": body.reasoning.effort,
            "summary": body.reasoning.summary or body.reasoning.generate_summary,
        },
        "safety_identifier": body.safety_identifier or None,
        "service_tier": "default",
        "store": body.store,
        "text": {"format": _format(body), "verbosity": body.text.verbosity or "medium"},
        "tool_choice": default_choice if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "tools": [_echoed_tool(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user or None,
    }


def _echoed_tool(tool: ResponseTool) -> Json:
    fields: Json = msgspec.to_builtins(tool)
    idle = (() if tool.namespace else ("namespace",)) + (() if tool.defer_loading else ("defer_loading",))
    return {name: value for name, value in fields.items() if name not in idle}


def _format(body: ResponseBody) -> Json:
    if body.text.format is None:
        return {"type": "text"}
    text_format = msgspec.to_builtins(body.text.format)
    return text_format if text_format["type"] == "json_schema" else {"type": text_format["type"]}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class ResponsesBuilder:
    """Builds one response. Events are numbered, and the same deltas give the same events in every gateway."""

    def __init__(self, header: ResponseHeader, tokenizer: Tokenizer, options: ResponsesOptions) -> None:
        self._header = header
        self._words = TokenWords(tokenizer, as_ids=False)
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=options.calls is None, at_start=True)
        self._options = options
        calls = options.calls
        self._calls = (
            None if calls is None else ToolCallWriter(header.request_id, calls, is_streamed=options.is_streamed)
        )
        self._items: list[Json] = []
        self._is_open = False  # the last item
        self._unsent_logprobs: list[Json] = []  # of held-back text
        self._finish_reason: str | None = None
        self._num_events = 0

    @property
    def response_id(self) -> str:
        return RESPONSE_PREFIX + self._header.request_id

    def whole(self, deltas: Sequence[ChoiceDelta], outcome: Outcome) -> Json:
        for delta in deltas:
            self.chunks(delta)
        return response_of(self.closing(outcome))

    def opening(self) -> list[Json]:
        """Return the events before the first delta, once."""
        if self._num_events:
            return []
        return [
            self._event("response.created", response=self.unfinished("in_progress")),
            self._event("response.in_progress", response=self.unfinished("in_progress")),
        ]

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Return the delta's events."""
        events = self.opening()
        is_last = delta.finish_reason is not None
        if self._options.logprobs:
            visible = [entry for entry in delta.logprobs if not entry.is_reasoning]
            self._unsent_logprobs += chat_entries(self._words, visible, self._detokenizer)
        if delta.reasoning:
            events += self._reason(delta.reasoning)
        for json_delta in self._json_deltas(delta.text, is_last=is_last):
            if "tool_calls" in json_delta:
                for call in json_delta["tool_calls"]:
                    events += self._call(call)
            else:
                events += self._text(json_delta["content"])
        if is_last:
            self._finish_reason = delta.finish_reason
        return events

    def closing(self, outcome: Outcome) -> list[Json]:
        """Return the events after the last delta; the final one contains the response."""
        events = self.opening()
        if not self._items:
            events += self._open_message()
        is_whole = self._finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        events += self._close(status)
        details = None if is_whole else {"reason": "max_output_tokens"}
        response = self._response(status, incomplete_details=details, usage=_usage(outcome))
        return [*events, self._event(f"response.{status}", response=response)]

    def failure(self, error: RequestError) -> list[Json]:
        """Return the events after a failure."""
        events = self.opening()
        return [*events, self._event("response.failed", response=self.failed(error.code, error.message))]

    def failed(self, code: str | None, message: str) -> Json:
        """Return the response that ended with this error, including its output so far."""
        for item in self._items:
            item["status"] = "incomplete" if item["status"] == "in_progress" else item["status"]
        if code == EndReason.CANCELLED:
            return self._response("cancelled")
        return self._response("failed", error={"code": code or "server_error", "message": message})

    def unfinished(self, status: str) -> Json:
        """Return the response while it is queued or in_progress."""
        return self._response(status, output=[])

    def _json_deltas(self, text: str, *, is_last: bool) -> Iterable[Json]:
        if self._calls is not None:
            return self._calls.json_deltas(0, text, is_last=is_last)
        return [{"content": text}] if text else []

    def _text(self, text: str) -> list[Json]:
        events = [] if self._is_open and self._items[-1]["type"] == "message" else self._open_message()
        part = self._items[-1]["content"][0]
        part["text"] += text
        logprobs, self._unsent_logprobs = self._unsent_logprobs, []
        part["logprobs"] += logprobs
        return [*events, self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _open_message(self) -> list[Json]:
        item: Json = {"type": "message", "role": "assistant", "content": []}
        events = self._open("msg", item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return [*events, self._part_event("response.content_part.added", part=_copy(part))]

    def _reason(self, text: str) -> list[Json]:
        form = self._options.reasoning
        events: list[Json] = []
        if not self._is_open:
            events += self._open("rs", {"type": "reasoning", "summary": []})
            part = {"type": form.part_type, "text": ""}
            self._items[-1][form.place] = [part]
            events.append(self._reasoning_event("part.added", part=_copy(part)))
        self._items[-1][form.place][0]["text"] += text
        return [*events, self._reasoning_event("text.delta", delta=text)]

    def _reasoning_event(self, step: str, **fields: Any) -> Json:
        if self._options.reasoning.is_summary:
            return self._item_event(f"response.reasoning_summary_{step}", summary_index=0, **fields)
        kind = "response.content_" if step.startswith("part") else "response.reasoning_"
        return self._part_event(kind + step, **fields)

    def _reasoning_done(self, item: Json) -> list[Json]:
        form = self._options.reasoning
        (part,) = item[form.place]
        item |= form.closed(item)
        return [
            self._reasoning_event("text.done", text=part["text"]),
            self._reasoning_event("part.done", part=_copy(part)),
        ]

    def _call(self, call: Json) -> list[Json]:
        events: list[Json] = []
        function = call["function"]
        if "id" in call:
            self._unsent_logprobs.clear()
            namespace, name = self._options.namespaces.get(function["name"], (None, function["name"]))
            item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
            item |= {} if namespace is None else {"namespace": namespace}
            events += self._open("fc", item)
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            delta = function["arguments"]
            events.append(self._item_event("response.function_call_arguments.delta", delta=delta))
        return events

    def _open(self, prefix: str, item: Json) -> list[Json]:
        events = self._close("completed")
        name = f"{prefix}_{self._header.request_id}_{len(self._items)}"
        self._items.append({"id": name, **item, "status": "in_progress"})
        self._is_open = True
        return [*events, self._output_event("response.output_item.added")]

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "message":
            events = [*self._text_left(), *self._text_done(item["content"][0])]
        elif item["type"] == "reasoning":
            events = self._reasoning_done(item)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._item_event("response.function_call_arguments.done", **done)]
        item["status"] = status
        return [*events, self._output_event("response.output_item.done")]

    def _text_left(self) -> list[Json]:
        """Emit the log-probabilities of final tokens without text, such as EOS."""
        if not self._unsent_logprobs:
            return []
        self._is_open = True
        events = self._text("")
        self._is_open = False
        return events

    def _text_done(self, part: Json) -> list[Json]:
        return [
            self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._part_event("response.content_part.done", part=_copy(part)),
        ]

    def _response(self, status: str, **fields: Any) -> Json:
        header = self._header
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": header.created_s,
            "status": status,
            "background": self._options.is_background,
            "error": None,
            "incomplete_details": None,
            "model": header.model,
            "output": _copy(self._items),
            "usage": None,
            **self._options.echoed,
            **fields,
        }

    def _part_event(self, kind: str, **fields: Any) -> Json:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _output_event(self, kind: str) -> Json:
        return self._event(kind, output_index=len(self._items) - 1, item=_copy(self._items[-1]))

    def _event(self, kind: str, **fields: Any) -> Json:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}


def response_of(events: Sequence[Json]) -> Json:
    """Return the response in a stream's final event."""
    response: Json = events[-1]["response"]
    return response


def responses_builder_of(model: ServedModel, accepted: AcceptedRequest) -> ResponsesBuilder:
    """Return the builder for a request to `/v1/responses`."""
    header, options = ResponseHeader.of(model, accepted), ResponsesOptions.of(model, accepted)
    return ResponsesBuilder(header, model.tokenizer, options)


def _usage(outcome: Outcome) -> Json:
    return {
        "input_tokens": outcome.prompt_tokens,
        "input_tokens_details": {"cached_tokens": outcome.cached_tokens},
        "output_tokens": outcome.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens or 0, **prediction_json(outcome)},
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
    }


def _copy(value: Any) -> Any:
    """Copy an item for an event or response, because later deltas change it."""
    return msgspec.to_builtins(value)
