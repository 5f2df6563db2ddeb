"""Separates a streamed reply into text and function calls.

A malformed, truncated or unknown call is text, in which the search for openings resumes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.text.tool_calls.json_call import JsonCallReader
from model.text.tool_calls.python_call import PythonCallReader
from model.text.tool_calls.reader import BLANKS
from model.text.tool_calls.xml_call import BEGIN, XmlCallReader

BARE_NAME = re.compile(r"([A-Za-z0-9_.-]+)\s{0,8}(?:\[CALL_ID\]\w{1,40})?(?:\[ARGS\])?\s{0,8}(?=\{)")
MAX_BARE_NAME_CHARS = 160
MAX_UNPROVEN_CHARS = 64 << 10
"""Max characters held back before a call's name and arguments."""
MAX_HELD_BLANKS = 256
LOOKBACK_CHARS = 256
RESYNC_CHARS = 4 << 10
"""Tail of a malformed, partly emitted call that is searched for an opening."""
MAX_RESCANS = 4
"""Max malformed text reread, in reply lengths."""


@dataclass(frozen=True)
class CallSyntax:
    """Format of a model's calls: JSON, `name{...}`, XML-like elements or Python."""

    openings: tuple[str, ...]  # each begins a run of calls; grammars enforce the first
    closings: tuple[str, ...] = ()  # each ends a run
    fillers: str = BLANKS  # characters allowed around calls
    bare: str = ""  # first character of a run without an opening, if allowed
    at_start_only: bool = False  # a bare run must begin the reply
    bare_names: bool = False  # `name[ARGS]{...}` and `name{...}` are calls too
    in_xml: bool = False  # a call is `<function=name>...`, not JSON
    in_python: bool = False  # a call is `name(key=value)`


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class CallStart:
    number: int  # index in the reply
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """Part of a call's arguments; the parts join to JSON, unless the call is truncated or malformed."""

    number: int
    text: str


ToolCallEvent = TextDelta | CallStart | ArgumentsDelta
Reader = JsonCallReader | XmlCallReader | PythonCallReader


class ToolCallStream:
    """Linear-time parser of one reply; chunk boundaries do not matter.

    Emits every character once, except syntax and adjacent blanks. Holds back at most MAX_UNPROVEN_CHARS, unless
    `holds_calls`.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        schemas: Mapping[str, Any],
        max_calls: int | None = None,
        *,
        holds_calls: bool = False,
    ) -> None:
        """Take each known function's JSON schema; drop calls after `max_calls`.

        `holds_calls` emits only complete calls: a malformed one becomes text, not invalid arguments.
        """
        self._syntax = syntax
        self._schemas = schemas
        self._max_calls = max_calls
        self._holds_calls = holds_calls
        self._opening = re.compile("|".join(map(re.escape, _markers(syntax))))
        self._longest_opening = max(map(len, _markers(syntax)))
        self._mode = self._at_start if syntax.at_start_only else self._in_text
        self._buffer = ""
        self._waiting: list[str] = []  # not yet in the buffer
        self._num_waiting = 0
        self._num_dropped = 0  # characters dropped before the buffer
        self._pos = 0  # next character to read
        self._emitted = 0  # end of the emitted part of the buffer
        self._is_ended = False
        self._reader: Reader | None = None
        self._begin = 0  # of a possible call, including its opening
        self._resume = 0  # continue here if it is not a call
        self._is_started = False
        self._follows_call = False  # only syntax separates it from the previous call
        self._run_has_calls = False
        self._is_closed = False  # the last call's run has ended
        self._has_bare_run = False
        self._rescan_until = 0  # position in the reply; earlier text was already read as a call
        self._num_rescanned = 0
        self.num_calls = 0

    def push(self, text: str) -> list[ToolCallEvent]:
        """Parse `text` and return the newly certain events."""
        self._waiting.append(text)
        self._num_waiting += len(text)
        is_held = self._holds_calls and self._mode == self._in_call and not self._is_ended
        if is_held and self._num_waiting < len(self._buffer) // 4:
            return []  # copy a long call rarely, not for each chunk
        self._buffer += "".join(self._waiting)
        self._waiting, self._num_waiting = [], 0
        events: list[ToolCallEvent] = []
        while self._mode(events):
            pass
        self._drop_emitted()
        return events

    def flush(self) -> list[ToolCallEvent]:
        """End the reply and return the held events."""
        self._is_ended = True
        events = self.push("")
        rest = self._buffer[self._emitted :]
        self._emitted = len(self._buffer)
        is_syntax = self.num_calls > 0 and not rest.strip(BLANKS)
        return events if is_syntax or not rest else [*events, TextDelta(rest)]

    # Modes. Each returns False if more text is needed.

    def _at_start(self, events: list[ToolCallEvent]) -> bool:
        start = self._skip_chars(self._pos, BLANKS)
        if self._may_complete_marker(start, (*self._syntax.openings, self._syntax.bare)) and start <= MAX_HELD_BLANKS:
            return False
        is_run = start <= MAX_HELD_BLANKS and self._opening_at(start) is not None
        self._mode = self._in_text if is_run else self._in_plain_text
        return True

    def _in_plain_text(self, events: list[ToolCallEvent]) -> bool:
        self._pos = len(self._buffer)
        self._emit_text(self._pos, events)
        return False

    def _in_text(self, events: list[ToolCallEvent]) -> bool:
        found = self._find_opening()
        if found is None:
            keep = 0 if self._is_ended else _overlap(self._buffer, self._pos, _markers(self._syntax))
            self._pos = len(self._buffer) - keep
            self._emit_text_but_blanks(self._pos, events)
            return False
        begin, end = found
        self._emit_text_but_blanks(begin, events)
        self._expect_call(begin, end - begin, follows_call=False)
        return True

    def _expect_call(self, begin: int, opening_length: int, *, follows_call: bool) -> None:
        self._begin, self._pos = begin, begin + opening_length
        self._resume = max(self._pos, begin + 1)
        self._follows_call, self._run_has_calls = follows_call, False
        self._mode = self._before_call

    def _before_call(self, events: list[ToolCallEvent]) -> bool:
        fillers = self._syntax.fillers + self._syntax.bare if self._syntax.in_python else self._syntax.fillers
        self._pos = self._skip_chars(self._pos, fillers)
        reader = self._reader_here()
        if reader is None:
            if self._may_complete_call():
                return False
            self._reject_call()
        else:
            self._begin_call(reader)
        return True

    def _after_call(self, events: list[ToolCallEvent]) -> bool:
        syntax, is_call = self._syntax, self._run_has_calls
        end = self._skip_chars(self._pos, BLANKS if self._is_closed else syntax.fillers)
        self._mode = self._in_text
        if end - self._pos > MAX_HELD_BLANKS:
            return True
        marker = next((m for m in syntax.closings if self._buffer.startswith(m, end)), None)
        opening = self._opening_at(end)
        if marker is not None and is_call:
            self._pos = self._emitted = end + len(marker)
            self._is_closed, self._mode = True, self._after_call
        elif opening is not None or self._next_call_at(end):
            if not is_call:
                self._emit_text_but_blanks(end, events)
            self._expect_call(end, opening or 0, follows_call=is_call)
        elif self._may_complete_marker(end, (*_markers(syntax), *syntax.closings)):
            self._mode = self._after_call
            return False
        elif self._is_ended and end == len(self._buffer) and is_call:
            self._emitted = end
        return True

    def _in_call(self, events: list[ToolCallEvent]) -> bool:
        reader, buffer, pos = self._reader, self._buffer, self._pos
        if reader is None:
            raise RuntimeError("no call is being read")
        end, is_called, feed = len(buffer), reader.is_call, reader.feed
        while pos < end and not reader.is_done:
            feed(buffer[pos])
            if reader.is_bad:
                break
            pos += 1
            # check each character, so that chunk boundaries do not matter
            if not is_called and not reader.is_done:
                is_called = reader.is_call
                if is_called and not self._holds_calls:
                    self._start_call(reader, pos, events)
                elif not is_called and pos - self._begin > MAX_UNPROVEN_CHARS:
                    reader.is_bad = True
                    break
        self._pos = pos
        self._has_bare_run = self._has_bare_run or is_called or reader.is_done or reader.has_opened
        if reader.is_done and not reader.is_bad:
            self._end_call(reader, events)
            return True
        self._emit_arguments(reader, events)
        if reader.is_bad or self._is_ended:
            self._reject_call()
            return True
        return False

    # Calls

    def _reader_here(self) -> Reader | None:
        buffer, pos, syntax = self._buffer, self._pos, self._syntax
        char = buffer[pos : pos + 1]
        if syntax.in_xml:
            return XmlCallReader(self._schemas) if buffer.startswith(BEGIN, pos) else None
        if syntax.in_python:
            return PythonCallReader(self._schemas) if char.isalnum() or char == "_" else None
        if char == "{":
            return JsonCallReader(self._schemas)
        name = self._bare_name(pos) if syntax.bare_names else None
        if name is None:
            return None
        self._pos = buffer.index("{", pos)
        return JsonCallReader(self._schemas, name)

    def _bare_name(self, pos: int) -> str | None:
        found = BARE_NAME.match(self._buffer, pos, pos + MAX_BARE_NAME_CHARS)
        return found[1] if found and found[1] in self._schemas else None

    def _may_complete_call(self) -> bool:
        rest = self._buffer[self._pos : self._pos + MAX_BARE_NAME_CHARS]
        if self._is_ended or self._pos - self._begin > MAX_UNPROVEN_CHARS:
            return False
        if self._syntax.in_xml:
            return BEGIN.startswith(rest)
        if self._syntax.bare_names:
            return len(rest) < MAX_BARE_NAME_CHARS and "{" not in rest
        return not rest

    def _may_complete_marker(self, pos: int, markers: tuple[str, ...]) -> bool:
        rest = self._buffer[pos : pos + max(map(len, markers))]
        return not self._is_ended and any(len(rest) < len(m) and m.startswith(rest) for m in markers)

    def _opening_at(self, pos: int) -> int | None:
        """Return the length of the opening at `pos`; 0 if the call itself begins there."""
        syntax = self._syntax
        opening = next((m for m in syntax.openings if self._buffer.startswith(m, pos)), None)
        if opening is not None:
            return len(opening)
        if syntax.in_xml and self._buffer.startswith(BEGIN, pos):
            return 0
        if syntax.bare and not self._is_closed and self._buffer.startswith(syntax.bare, pos):
            return len(syntax.bare) if syntax.in_python else 0
        return None

    def _next_call_at(self, pos: int) -> bool:
        syntax = self._syntax
        if self._is_closed or syntax.in_xml:
            return False
        if syntax.in_python:
            between = self._buffer[self._pos : pos]
            return self._buffer[pos : pos + 1].isidentifier() and ("," in between or "\n" in between)
        return self._buffer.startswith("{", pos)

    def _begin_call(self, reader: Reader) -> None:
        self._reader, self._is_started, self._mode = reader, False, self._in_call
        self._resume = self._pos + 1

    def _start_call(self, reader: Reader, pos: int, events: list[ToolCallEvent]) -> None:
        if not self._follows_call:
            self._emit_text_but_blanks(self._begin, events)
        self._is_started = True
        self._emitted = pos
        if self._is_within_limit:
            events.append(CallStart(self.num_calls, reader.name or ""))

    def _emit_arguments(self, reader: Reader, events: list[ToolCallEvent]) -> None:
        if not self._is_started:
            return
        self._emitted = self._pos
        text = reader.take_arguments()
        if text and self._is_within_limit:
            events.append(ArgumentsDelta(self.num_calls, text))

    def _end_call(self, reader: Reader, events: list[ToolCallEvent]) -> None:
        is_call = reader.is_call
        if is_call:
            if not self._is_started:
                self._start_call(reader, self._pos, events)
            self._emit_arguments(reader, events)
            self.num_calls += 1
        self._rescan_until = max(self._rescan_until, self._num_dropped + self._pos)
        self._reader, self._is_started, self._mode = None, False, self._after_call
        self._run_has_calls, self._is_closed = is_call, False

    def _reject_call(self) -> None:
        """Search for an opening in the rejected call, within MAX_RESCANS."""
        if self._is_started:
            self.num_calls += 1
            self._resume = max(self._resume, self._pos - RESYNC_CHARS)
        self._reader, self._is_started, self._mode = None, False, self._in_text
        read_to = self._num_dropped + self._pos
        self._rescan_until = max(self._rescan_until, read_to)
        cost = self._pos - self._resume
        if self._num_rescanned + cost <= MAX_RESCANS * read_to:
            self._num_rescanned += max(0, cost)
            self._pos = self._resume
        else:
            self._pos = max(self._pos, self._resume)

    @property
    def _is_within_limit(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    # Text

    def _find_opening(self) -> tuple[int, int] | None:
        bare, pos = self._syntax.bare, self._pos
        while found := self._opening.search(self._buffer, pos):
            begin, pos = found.span()
            if found[0] == BEGIN:
                return begin, begin
            if found[0] != bare and found[0] != ",":
                return begin, pos
            if self._may_begin_run(begin):
                return begin, begin + (self._syntax.in_python)
        return None

    def _may_begin_run(self, pos: int) -> bool:
        """Return whether a bare run, or a call in one, may begin at `pos`.

        It may begin anywhere in new text unless `at_start_only`, else only after a separator.
        """
        char, is_new = self._buffer[pos], self._num_dropped + pos >= self._rescan_until
        if char == self._syntax.bare and is_new and not self._syntax.at_start_only:
            return True
        before = self._buffer[max(0, pos - LOOKBACK_CHARS) : pos]
        stripped = before.rstrip(BLANKS)
        if char == ",":
            return self._has_bare_run and stripped.endswith(")")
        if not stripped:
            return self._num_dropped + pos <= LOOKBACK_CHARS
        is_new_line = "\n" in before[len(stripped) :]
        return stripped.endswith(";") or (is_new_line and stripped[-1] in "}])")

    def _skip_chars(self, pos: int, fillers: str) -> int:
        buffer, end = self._buffer, len(self._buffer)
        while pos < end and buffer[pos] in fillers:
            pos += 1
        return pos

    def _emit_text(self, to: int, events: list[ToolCallEvent]) -> None:
        if to > self._emitted:
            events.append(TextDelta(self._buffer[self._emitted : to]))
            self._emitted = to

    def _emit_text_but_blanks(self, to: int, events: list[ToolCallEvent]) -> None:
        """Emit text without its last blanks, which are dropped if an opening follows."""
        text = self._buffer[self._emitted : to]
        num_blanks = len(text) - len(text.rstrip(BLANKS))
        self._emit_text(to - min(num_blanks, MAX_HELD_BLANKS), events)

    def _drop_emitted(self) -> None:
        if self._mode == self._in_call:
            again = max(self._resume, self._pos - RESYNC_CHARS) if self._is_started else self._begin
        else:
            again = self._begin if self._mode == self._before_call else self._pos
        drop = min(self._emitted, again, self._pos - LOOKBACK_CHARS)
        if drop < max(LOOKBACK_CHARS, len(self._buffer) // 2):
            return
        self._buffer = self._buffer[drop:]
        self._num_dropped += drop
        self._pos -= drop
        self._emitted -= drop
        self._begin -= drop
        self._resume -= drop


def _markers(syntax: CallSyntax) -> tuple[str, ...]:
    bare = (syntax.bare,) if syntax.bare else ()
    return (*syntax.openings, *bare, *((BEGIN,) if syntax.in_xml else ()), *((",",) if syntax.in_python else ()))


def _overlap(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text[start:]` that may begin a marker."""
    longest = min(len(text) - start, max(map(len, markers)) - 1)
    tails = (text[len(text) - n :] for n in range(longest, 0, -1))
    return next((len(tail) for tail in tails if any(marker.startswith(tail) for marker in markers)), 0)
