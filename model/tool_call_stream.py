"""What a model says, told apart while it says it: text for people, and calls of functions with their arguments."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEY = "name"
ARGS_MARKER = "[ARGS]"
BLANKS = " \t\r\n"


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes calls. Each is a JSON object with a name and arguments, or a name before its arguments."""

    opening: str  # begins a run of calls
    closing: str = ""  # ends it
    fillers: str = BLANKS  # characters that may stand around calls
    at_start_only: bool = False  # a reply is calls from its first character, opening or not, or it is text
    bare_names: bool = False  # after the opening, `name[ARGS]{...}` and `name{...}` are calls too


@dataclass(frozen=True)
class Said:
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


class CallReader:
    """One call, character by character."""

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        """With a `name` only the arguments are read."""
        self.name = name
        self.is_done = False
        self.is_bad = False
        self._names = names
        self._only_arguments = name is not None
        self._state = self._before_value if name is not None else self._before_object
        self._key = ARGUMENT_KEYS[0] if name is not None else ""
        self._read: list[str] = []
        self._value: list[str] = []  # of a key, or as far as it may be a name or arguments in a string
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._arguments: list[str] = []  # not yet taken
        self._has_arguments = False

    @property
    def is_call(self) -> bool:
        """Whether enough is known to say so: its name, and that its arguments begin or that it has none."""
        return self.name is not None and not self.is_bad and (self._has_arguments or self.is_done)

    @property
    def raw(self) -> str:
        """All it has read, for what turns out to be no call."""
        return "".join(self._read)

    def feed(self, char: str) -> None:
        self._read.append(char)
        self._state(char)

    def take_arguments(self) -> str:
        """What is new of them, once the name is known."""
        if self.name is None:
            return ""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _before_object(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in BLANKS:
            self.is_bad = True

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._value, self._in_string, self._state = [char], True, self._in_key
        elif char == "}":
            self._end_object()
        elif char not in BLANKS:
            self.is_bad = True

    def _in_key(self, char: str) -> None:
        if self._string_ends(char):
            self._key = _decoded(self._value) or ""
            self._state = self._before_colon

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._state = self._before_value
        elif char not in BLANKS:
            self.is_bad = True

    def _before_value(self, char: str) -> None:
        if char in BLANKS:
            return
        self._value, self._depth, self._state = [], 0, self._in_value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if self._in_string:
            ends = self._string_ends(char)
            self._tell(char)
            if ends and self._depth == 0:
                self._end_value()
            return
        if self._depth == 0 and self._value and char in BLANKS + ",}]":
            self._end_value()
            if not self.is_bad:
                self._state(char)
            return
        self._value.append(char)
        self._tell(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth < 0:
                self.is_bad = True
            elif self._depth == 0:
                self._end_value()

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self._end_object()
        elif char not in BLANKS:
            self.is_bad = True

    def _string_ends(self, char: str) -> bool:
        """Takes a character of a string, and says whether it is its closing quote."""
        self._value.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
        return not self._in_string

    def _tell(self, char: str) -> None:
        # Arguments in a string are JSON inside JSON: told once they can be decoded.
        if self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            if self._value[0] != '"':
                self._arguments.append(char)

    def _end_value(self) -> None:
        self._state = self._after_value
        if self._key == NAME_KEY:
            name = _decoded(self._value)
            self.name, self.is_bad = name, name not in self._names
        elif self._key in ARGUMENT_KEYS and self._value[0] == '"':
            self._arguments.append(_decoded(self._value) or "")
        if self._only_arguments:
            self._end_object()

    def _end_object(self) -> None:
        self.is_done, self.is_bad = self.name is not None, self.is_bad or self.name is None


class ToolCallStream:
    """One reply. `push` and `end` together tell each of its characters once, as text or as part of a call, but for the
    syntax around calls."""

    def __init__(self, syntax: CallSyntax, names: Collection[str], max_calls: int | None = None) -> None:
        """Calls of functions that are not in `names` are text. Of more calls than `max_calls`, the rest is dropped."""
        self._syntax = syntax
        self._names = names
        self._max_calls = max_calls
        self._mode = self._at_start if syntax.at_start_only else self._in_text
        self._buffer = ""
        self._skipped = ""  # since an opening: syntax, if a call follows
        self._run_has_calls = False  # since the last opening
        self._reader: CallReader | None = None
        self._is_announced = False
        self.num_calls = 0

    def push(self, text: str) -> list[News]:
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
        elif self._buffer.startswith("{"):
            self._begin(CallReader(self._names))
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
            if len(self._buffer) <= max(map(len, self._names), default=0) + len(ARGS_MARKER):
                return False
        elif name.removesuffix(ARGS_MARKER).strip() in self._names:
            self._skip(len(name))
            self._begin(CallReader(self._names, name.removesuffix(ARGS_MARKER).strip()))
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

    def _announce(self, reader: CallReader, news: list[News]) -> None:
        self._is_announced, self._skipped = True, ""
        if self._is_wanted:
            news.append(Called(self.num_calls, reader.name))

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _begin(self, reader: CallReader) -> None:
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


def _decoded(literal: Sequence[str]) -> str | None:
    """The text of a JSON string; None for any other value."""
    try:
        value = json.loads("".join(literal), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
