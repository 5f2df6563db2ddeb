"""What a model says, told apart while it says it: text for people, and calls of functions with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.tool_call_json import JsonCallReader
from model.tool_call_reader import BLANKS
from model.tool_call_xml import BEGIN, XmlCallReader

ARGS_MARKER = "[ARGS]"


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes calls. Each is a JSON object with a name and arguments, or a name before its arguments, or an
    element of XML's kind."""

    opening: str  # begins a run of calls
    closing: str = ""  # ends it
    fillers: str = BLANKS  # characters that may stand around calls
    at_start_only: bool = False  # a reply is calls from its first character, opening or not, or it is text
    bare_names: bool = False  # after the opening, `name[ARGS]{...}` and `name{...}` are calls too
    in_xml: bool = False  # a call is `<function=name>` and so on, no JSON


@dataclass(frozen=True)
class Said:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class Called:
    """A call begins. Its arguments follow."""

    number: int  # 0, 1, 2, ... within the reply
    name: str


@dataclass(frozen=True)
class Argued:
    """Some more of a call's arguments: all of them together are JSON."""

    number: int
    text: str


News = Said | Called | Argued
Reader = JsonCallReader | XmlCallReader


class ToolCallStream:
    """One reply. `push` and `end` together tell each of its characters once, as text or as part of a call, but for the
    syntax around calls."""

    def __init__(self, syntax: CallSyntax, schemas: Mapping[str, Any], max_calls: int | None = None) -> None:
        """`schemas`: by name of a function, the JSON schema of its arguments; calls of others are text. Of more calls
        than `max_calls`, the rest is dropped."""
        self._syntax = syntax
        self._schemas = schemas
        self._max_calls = max_calls
        self._mode = self._at_start if syntax.at_start_only else self._in_text
        self._buffer = ""
        self._skipped = ""  # since an opening: syntax, if a call follows
        self._run_has_calls = False  # since the last opening
        self._reader: Reader | None = None
        self._is_announced = False
        self.num_calls = 0

    def push(self, text: str) -> list[News]:
        """What is certain now that `text` has followed what came before; the rest is held back."""
        self._buffer += text
        news: list[News] = []
        while self._buffer and self._mode(news):
            pass
        return news

    def end(self) -> list[News]:
        """No text follows: what was held back is told."""
        reader, self._reader = self._reader, None
        rest = self._skipped + (reader.raw if reader is not None and not self._is_announced else "") + self._buffer
        self._buffer = self._skipped = ""
        is_syntax = self.num_calls > 0 and not rest.strip(self._syntax.fillers)
        return [] if is_syntax or not rest else [Said(rest)]

    def _at_start(self, news: list[News]) -> bool:
        rest = self._buffer.lstrip(BLANKS)
        if not rest or self._syntax.opening.startswith(rest):
            return False
        if rest.startswith(self._syntax.opening):
            self._skip(len(self._buffer) - len(rest) + len(self._syntax.opening))
        elif not rest.startswith("{"):
            self._mode = self._in_plain_text
            return True
        self._mode = self._between
        return True

    def _in_plain_text(self, news: list[News]) -> bool:
        news.append(Said(self._skipped + self._buffer))
        self._skipped = self._buffer = ""
        return False

    def _in_text(self, news: list[News]) -> bool:
        opening = self._syntax.opening
        found = self._buffer.find(opening)
        cut = found if found >= 0 else len(self._buffer) - _overlap(self._buffer, opening)
        cut = len(self._buffer[:cut].rstrip(BLANKS))
        if cut:
            news.append(Said(self._buffer[:cut]))
            self._buffer = self._buffer[cut:]
        if found < 0:
            return False
        self._run_has_calls = False
        self._skip(self._buffer.index(opening) + len(opening))
        self._mode = self._between
        return True

    def _between(self, news: list[News]) -> bool:
        """Where a call may begin."""
        syntax = self._syntax
        self._skip(len(self._buffer) - len(self._buffer.lstrip(BLANKS)))
        if not self._buffer:
            return False
        for marker in (syntax.closing, syntax.opening):
            if marker and self._buffer.startswith(marker):
                if marker == syntax.closing:
                    self._mode = self._in_text if self._run_has_calls else self._in_plain_text
                else:
                    self._run_has_calls = False
                self._skip(len(marker))
                return True
            if marker and marker.startswith(self._buffer):
                return False
        if self._buffer[0] in syntax.fillers:
            self._skip(1)
        elif syntax.in_xml and BEGIN.startswith(self._buffer[: len(BEGIN)]):
            if len(self._buffer) < len(BEGIN):
                return False
            self._begin(XmlCallReader(self._schemas))
        elif self._buffer.startswith("{") and not syntax.in_xml:
            self._begin(JsonCallReader(self._schemas))
        elif syntax.bare_names:
            self._mode = self._in_bare_name
        else:
            self._mode = self._in_plain_text if syntax.at_start_only else self._in_text
            if self._skipped:
                news.append(Said(self._skipped))
                self._skipped = ""
        return True

    def _in_bare_name(self, news: list[News]) -> bool:
        name, brace, _ = self._buffer.partition("{")
        if not brace:
            if len(self._buffer) <= max(map(len, self._schemas), default=0) + len(ARGS_MARKER):
                return False
        elif name.removesuffix(ARGS_MARKER).strip() in self._schemas:
            self._skip(len(name))
            self._begin(JsonCallReader(self._schemas, name.removesuffix(ARGS_MARKER).strip()))
            return True
        self._mode = self._in_plain_text
        return True

    def _in_call(self, news: list[News]) -> bool:
        reader = self._reader
        num_read = 0
        while num_read < len(self._buffer) and not (reader.is_done or reader.is_bad):
            reader.feed(self._buffer[num_read])
            num_read += 1
            # At this very character, so that it does not matter in which pieces the text comes.
            if reader.is_call and not self._is_announced:
                self._announce(reader, news)
        self._buffer = self._buffer[num_read:]
        if reader.is_bad and not self._is_announced:
            self._buffer = self._skipped + reader.raw + self._buffer
            self._skipped, self._reader = "", None
            self._mode = self._in_plain_text
            return True
        text = reader.take_arguments() if self._is_announced else ""
        if text and self._is_wanted:
            news.append(Argued(self.num_calls, text))
        if not (reader.is_done or reader.is_bad):
            return False
        self.num_calls += 1
        self._reader, self._mode, self._run_has_calls = None, self._between, True
        return True

    def _announce(self, reader: Reader, news: list[News]) -> None:
        self._is_announced, self._skipped = True, ""
        if self._is_wanted:
            news.append(Called(self.num_calls, reader.name))

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _begin(self, reader: Reader) -> None:
        self._reader, self._is_announced, self._mode = reader, False, self._in_call

    def _skip(self, count: int) -> None:
        """Syntax if a call follows, or has just been; else it will be text."""
        if not self._run_has_calls:
            self._skipped += self._buffer[:count]
        self._buffer = self._buffer[count:]


def _overlap(text: str, marker: str) -> int:
    """How long the end of `text` is that may begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
