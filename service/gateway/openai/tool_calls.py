"""Tool calls in OpenAI's JSON: whole in a message, or as stream deltas."""

from __future__ import annotations

import hashlib
from typing import Any

from model.text.tool_calls.stream import ArgumentsDelta, CallStart, TextDelta, ToolCallEvent, ToolCallStream
from service.gateway.core.served_model import CallOptions
from service.gateway.openai.json_objects import Json

SHORT_ID_CHARS = 9


class ToolCallWriter:
    """Splits the text of a response's choices into content and tool calls."""

    def __init__(self, request_id: str, options: CallOptions, *, is_streamed: bool = True) -> None:
        """A malformed or truncated call becomes text, unless a stream has sent its beginning."""
        self._request_id = request_id
        self._options = options
        self._is_streamed = is_streamed
        self._streams: dict[int, ToolCallStream] = {}

    def json_deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        """Return the message deltas for a choice's next text."""
        events = self._stream(index).push(text)
        if is_last:
            events += self._stream(index).flush()
        return [self._json_delta(index, event) for event in events]

    def message(self, index: int, text: str) -> Json:
        """Return the content and calls of a whole message."""
        self._is_streamed = False
        content = ""
        calls: list[Json] = []
        for json_delta in self.json_deltas(index, text, is_last=True):
            content += json_delta.get("content", "")
            gather_calls(calls, json_delta)
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def finish_reason(self, index: int, word: str | None) -> str | None:
        """Return "tool_calls" if the choice stopped after calls that the model chose to make."""
        has_called = self._stream(index).num_calls > 0
        return "tool_calls" if word == "stop" and has_called and not self._options.is_named else word

    def _stream(self, index: int) -> ToolCallStream:
        if index not in self._streams:
            options = self._options
            max_calls = 1 if options.only_one else None
            syntax, schemas = options.format.syntax, options.schemas
            self._streams[index] = ToolCallStream(syntax, schemas, max_calls, holds_calls=not self._is_streamed)
        return self._streams[index]

    def _json_delta(self, index: int, event: ToolCallEvent) -> Json:
        match event:
            case TextDelta(text):
                return {"content": text}
            case CallStart(number, name):
                function = {"name": name, "arguments": ""}
                return _call(number, id=self._call_id(index, number), type="function", function=function)
            case ArgumentsDelta(number, text):
                return _call(number, function={"arguments": text})

    def _call_id(self, index: int, number: int) -> str:
        """Return an id that is the same in every gateway."""
        digest = hashlib.sha256(f"{self._request_id}:{index}:{number}".encode()).hexdigest()
        return digest[:SHORT_ID_CHARS] if self._options.format.short_ids else f"call_{digest[:24]}"


def _call(number: int, **fields: Any) -> Json:
    return {"tool_calls": [{"index": number, **fields}]}


def gather_calls(calls: list[Json], json_delta: Json) -> None:
    """Merge a delta into a list of whole calls."""
    for call in json_delta.get("tool_calls", ()):
        if call["index"] == len(calls):
            calls.append({name: value for name, value in call.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
