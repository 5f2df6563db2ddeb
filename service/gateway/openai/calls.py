"""Calls of functions in OpenAI's JSON: whole in a message, or as deltas of a stream."""

from __future__ import annotations

import hashlib
from typing import Any

from model.text.tool_calls.stream import Argued, Called, News, Said, ToolCallStream
from service.gateway.generation.served_model import CallWording

Json = dict[str, Any]

SHORT_ID_CHARS = 9


class CallTeller:
    """One answer, all its choices."""

    def __init__(self, request_id: str, wording: CallWording, *, is_streamed: bool = True) -> None:
        """A call that turns out malformed or cut off is text, unless the answer `is_streamed` and has told a part."""
        self._request_id = request_id
        self._wording = wording
        self._is_streamed = is_streamed
        self._streams: dict[int, ToolCallStream] = {}

    def deltas(self, index: int, text: str, *, is_last: bool) -> list[Json]:
        """What the next text of a choice adds to its message."""
        news = self._stream(index).push(text)
        if is_last:
            news += self._stream(index).end()
        return [self._delta(index, one) for one in news]

    def message(self, index: int, text: str) -> Json:
        """The content of a whole message, and its calls if there are any."""
        self._is_streamed = False
        said, calls = "", []
        for delta in self.deltas(index, text, is_last=True):
            said += delta.get("content", "")
            gather_calls(calls, delta)
        return {"content": said or None, "tool_calls": calls} if calls else {"content": said}

    def finish_reason(self, index: int, word: str | None) -> str | None:
        """OpenAI says "tool_calls" where the model itself chose to call."""
        has_called = self._stream(index).num_calls > 0
        return "tool_calls" if word == "stop" and has_called and not self._wording.is_named else word

    def _stream(self, index: int) -> ToolCallStream:
        if index not in self._streams:
            wording = self._wording
            most = 1 if wording.only_one else None
            syntax, schemas = wording.form.syntax, wording.schemas
            self._streams[index] = ToolCallStream(syntax, schemas, most, holds_calls=not self._is_streamed)
        return self._streams[index]

    def _delta(self, index: int, news: News) -> Json:
        match news:
            case Said(text):
                return {"content": text}
            case Called(number, name):
                function = {"name": name, "arguments": ""}
                return _call(number, id=self._call_id(index, number), type="function", function=function)
            case Argued(number, text):
                return _call(number, function={"arguments": text})

    def _call_id(self, index: int, number: int) -> str:
        """The same from whichever gateway."""
        digest = hashlib.sha256(f"{self._request_id}:{index}:{number}".encode()).hexdigest()
        return digest[:SHORT_ID_CHARS] if self._wording.form.short_ids else f"call_{digest[:24]}"


def _call(number: int, **what: Any) -> Json:
    return {"tool_calls": [{"index": number, **what}]}


def gather_calls(calls: list[Json], delta: Json) -> None:
    """Adds to whole calls what a delta says of them."""
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(calls):
            calls.append({name: value for name, value in call.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
