"""Calls of functions in OpenAI's JSON: whole in a message, or as deltas of a stream."""

from __future__ import annotations

import hashlib
from typing import Any

from model.text.tool_calls.stream import ArgumentsDelta, CallStart, TextDelta, ToolCallEvent, ToolCallStream
from service.gateway.generation.served_model import CallOptions

Json = dict[str, Any]

SHORT_ID_CHARS = 9


class ToolCallWriter:
    """One answer, all its choices."""

    def __init__(self, request_id: str, options: CallOptions, *, is_streamed: bool = True) -> None:
        """A call that turns out malformed or cut off is text, unless the answer `is_streamed` and has told a part."""
        self._request_id = request_id
        self._options = options
        self._is_streamed = is_streamed
        self._streams: dict[int, ToolCallStream] = {}

    def json_deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        """What the next text of a choice adds to its message."""
        news = self._stream(index).push(text)
        if is_last:
            news += self._stream(index).flush()
        return [self._json_delta(index, one) for one in news]

    def message(self, index: int, text: str) -> Json:
        """The content of a whole message, and its calls if there are any."""
        self._is_streamed = False
        said, calls = "", []
        for json_delta in self.json_deltas(index, text, is_last=True):
            said += json_delta.get("content", "")
            gather_calls(calls, json_delta)
        return {"content": said or None, "tool_calls": calls} if calls else {"content": said}

    def finish_reason(self, index: int, word: str | None) -> str | None:
        """OpenAI says "tool_calls" where the model itself chose to call."""
        has_called = self._stream(index).num_calls > 0
        return "tool_calls" if word == "stop" and has_called and not self._options.is_named else word

    def _stream(self, index: int) -> ToolCallStream:
        if index not in self._streams:
            options = self._options
            most = 1 if options.only_one else None
            syntax, schemas = options.form.syntax, options.schemas
            self._streams[index] = ToolCallStream(syntax, schemas, most, holds_calls=not self._is_streamed)
        return self._streams[index]

    def _json_delta(self, index: int, news: ToolCallEvent) -> Json:
        match news:
            case TextDelta(text):
                return {"content": text}
            case CallStart(number, name):
                function = {"name": name, "arguments": ""}
                return _call(number, id=self._call_id(index, number), type="function", function=function)
            case ArgumentsDelta(number, text):
                return _call(number, function={"arguments": text})

    def _call_id(self, index: int, number: int) -> str:
        """The same from whichever gateway."""
        digest = hashlib.sha256(f"{self._request_id}:{index}:{number}".encode()).hexdigest()
        return digest[:SHORT_ID_CHARS] if self._options.form.short_ids else f"call_{digest[:24]}"


def _call(number: int, **what: Any) -> Json:
    return {"tool_calls": [{"index": number, **what}]}


def gather_calls(calls: list[Json], json_delta: Json) -> None:
    """Adds to whole calls what a delta says of them."""
    for call in json_delta.get("tool_calls", ()):
        if call["index"] == len(calls):
            calls.append({name: value for name, value in call.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
