"""Bounds the methods and filters of chat templates by charging their output before they run.

Unlisted ones are refused: any might turn a few characters into gigabytes.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.utils import Namespace, _PassArg
from markupsafe import Markup

MAX_ITEMS = 1 << 20
"""Max items of a list, or in total of a nested value."""
MAX_INT_BITS = 1 << 14
ITEM_CHARS = 8
"""Charge per list item, in characters."""
REPR_GROWTH = 10
r"""Longest escape in a Python literal, \U0001f600."""
NODES_PER_TIME_CHECK = 1 << 12
CASE_GROWTH = 3  # "ΐ".upper() has three characters
ESCAPE_GROWTH = 5  # &#34;
URL_GROWTH = 12
JSON_GROWTH = 12  # \ud83d\ude00
MAX_FIELD_DIGITS = 4
MAX_INDENT = 64
MAX_PRECISION = 300
MAX_NUMBER_CHARS = 4000
SLOW_CHARS = 1 << 20  # limit for operations that take 1 us or more per character
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"

_WIDE_FIELD = re.compile(rf"\d{{{MAX_FIELD_DIGITS + 1},}}|\*")
_DIGITS = re.compile(r"\d+")
_PRINTF = re.compile(r"%(?P<name>\([^)]{0,200}(?P<end>\))?)?(?P<width>[^a-zA-Z%]*)(?P<kind>[a-zA-Z%])")


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    max_chars: int = 16 * 2**20  # of the rendered text or any intermediate value
    max_total_chars: int = 512 * 2**20  # of all values, including discarded ones
    max_s: float = 2.0  # CPU time


class Meter:
    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self.max_chars = limits.max_chars
        self._num_charged = 0
        self._deadline_s = time.thread_time() + limits.max_s

    def check_time(self) -> None:
        if time.thread_time() > self._deadline_s:
            raise SecurityError("the template takes too long")

    def charge(self, num_chars: int) -> None:
        self.check_time()
        self._num_charged += num_chars
        if num_chars > self._limits.max_chars or self._num_charged > self._limits.max_total_chars:
            raise SecurityError("a value is too large")

    def charge_items(self, num_items: int) -> None:
        if num_items > MAX_ITEMS:
            raise SecurityError("a list is too long")
        self.charge(ITEM_CHARS * num_items)

    def measure(self, value: Any) -> int:
        """Return a value's characters, counting each nested occurrence. Raises SecurityError if too large or cyclic."""
        if isinstance(value, str):
            return len(value)
        num_chars, num_nodes, rest = 0, 0, [value]
        while rest:
            value = rest.pop()
            num_nodes += 1
            if isinstance(value, str | bytes):
                num_chars += len(value)
                continue
            num_chars += ITEM_CHARS
            if isinstance(value, int):
                self.check_int(value)
                num_chars += value.bit_length() // 3
            elif (parts := _parts(value)) is not None:
                if num_nodes + len(rest) + len(parts) > MAX_ITEMS:
                    raise SecurityError("a value has too many parts")
                rest.extend(parts)
            if num_nodes % NODES_PER_TIME_CHECK == 0:
                self.check_time()
        if num_chars > self._limits.max_chars:
            raise SecurityError("a value is too large")
        return num_chars

    def check_int(self, value: int) -> None:
        if value.bit_length() > MAX_INT_BITS:
            raise SecurityError("a number is too large")

    def timed_iter(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.check_time()
            yield value

    def bounded_list(self, values: Any) -> Any:
        """Return `values`, with an iterator read into a list. Raises SecurityError if too long."""
        if not hasattr(values, "__next__"):
            if hasattr(values, "__len__"):
                self.charge_items(len(values))
            return values
        found: list[Any] = []
        for value in values:
            self.charge(ITEM_CHARS)
            if len(found) >= MAX_ITEMS:
                raise SecurityError("a list is too long")
            found.append(value)
        return found


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()] if len(value) <= MAX_ITEMS else range(MAX_ITEMS + 1)
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    if isinstance(value, list | tuple | set | frozenset | type({}.keys()) | type({}.values()) | type({}.items())):
        return value
    return None


Check = Callable[..., Any]
"""Takes a Meter and the arguments; a filter's check returns the value. Raises SecurityError."""


def _size(meter: Meter, value: Any) -> int:
    if isinstance(value, str):
        return len(value) * (ESCAPE_GROWTH if isinstance(value, Markup) else 1)
    return REPR_GROWTH * meter.measure(value)


def _sizes(meter: Meter, values: Any) -> int:
    values = list(values)
    if any(isinstance(value, Markup) for value in values):
        return ESCAPE_GROWTH * sum(_size(meter, value) for value in values)
    return sum(len(value) if isinstance(value, str) else _size(meter, value) for value in values)


def _wide(meter: Meter, text: str, width: int = 80, *_: Any) -> None:
    meter.charge(_size(meter, text) + max(0, width))


def _text(growth: int) -> Check:
    def check(meter: Meter, text: Any, *_: Any, **__: Any) -> Any:
        meter.charge(growth * _size(meter, text))
        return text

    return check


def _constant_size(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
    meter.check_time()
    return value


def _replaced(meter: Meter, text: Any, old: Any, new: Any, count: int | None = -1) -> None:
    old, added = str(old) if isinstance(old, str) else "", _size(meter, new)
    text = text if isinstance(text, str) else " " * _size(meter, text)
    found = text.count(old) if old else len(text) + 1
    times = found if count is None or count < 0 else min(found, count)
    meter.charge(_size(meter, text) + times * added)


def _split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    most = MAX_ITEMS
    if sep:
        most = text.count(sep) + 1
    elif len(text) // 2 >= MAX_ITEMS:
        most = sum(1 for _ in re.finditer(r"\S+", text))
    else:
        most = len(text) // 2 + 1
    meter.charge_items(min(most, maxsplit + 1) if maxsplit >= 0 else most)
    meter.charge(len(text))


def _lines(meter: Meter, text: str, *_: Any) -> None:
    meter.charge_items(_num_lines(text))
    meter.charge(len(text))


def _num_lines(text: str) -> int:
    return 1 + sum(text.count(end) for end in LINE_ENDS)


def _joined(meter: Meter, between: str, values: Any) -> None:
    if hasattr(values, "__next__"):
        raise SecurityError("join requires a list")
    num_items = len(values)
    meter.charge_items(num_items)
    meter.charge(_sizes(meter, values) + num_items * _size(meter, between))


def _tabs(meter: Meter, text: str, tabsize: int = 8) -> None:
    meter.charge(len(text) + text.count("\t") * max(0, tabsize))


def _translated(meter: Meter, text: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise SecurityError("translate requires a dict")
    meter.charge(len(text) * max((len(value) for value in table.values() if isinstance(value, str)), default=1))


def _copied(meter: Meter, value: Any) -> None:
    meter.charge_items(len(value))


_METHODS: Mapping[type, Mapping[str, Check]] = {
    str: {
        **dict.fromkeys(
            ("count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
             "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "rfind", "rindex",
             "startswith"),
            _constant_size,
        ),
        **dict.fromkeys(
            ("lstrip", "partition", "removeprefix", "removesuffix", "rpartition", "rstrip", "strip", "swapcase"),
            _text(1),
        ),
        **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _text(CASE_GROWTH)),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _wide),
        "expandtabs": _tabs,
        "join": _joined,
        "replace": _replaced,
        "rsplit": _split,
        "split": _split,
        "splitlines": _lines,
        "translate": _translated,
    },
    dict: {**dict.fromkeys(("get", "items", "keys", "values"), _constant_size), "copy": _copied},
    list: {**dict.fromkeys(("count", "index"), _constant_size), "copy": _copied},
    tuple: dict.fromkeys(("count", "index"), _constant_size),
    range: dict.fromkeys(("count", "index"), _constant_size),
    float: {"is_integer": _constant_size},
    int: {"bit_length": _constant_size},
}  # fmt: skip


def method_check(owner: Any, name: str) -> Check | None:
    """Return the check for a built-in type's method; None if forbidden."""
    for kind, checks in _METHODS.items():
        if isinstance(owner, kind):
            return checks.get(name)
    return None


def check_printf(meter: Meter, form: Any, values: Any) -> None:
    if not isinstance(form, str):
        return
    num_chars, times, growth = _size(meter, form), 1, ESCAPE_GROWTH if isinstance(form, Markup) else 1
    for field in _PRINTF.finditer(form):
        if field["name"] and not field["end"]:
            raise SecurityError("the name of a field is too long")
        check_spec(field["width"])
        num_chars += sum(map(int, _DIGITS.findall(field["width"])))
        times += field["name"] is not None  # a mapping's value may be formatted repeatedly
        growth = max(growth, REPR_GROWTH if field["kind"] in "ra" else 1)
        meter.check_time()
    shown = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
    meter.charge(num_chars + growth * times * _sizes(meter, shown))


def check_spec(spec: str) -> None:
    if _WIDE_FIELD.search(spec):
        raise SecurityError("a field is too wide")


def _format(meter: Meter, form: Any, *args: Any, **kwargs: Any) -> Any:
    check_printf(meter, form, kwargs or args)
    return form


def _join_filter(meter: Meter, values: Any, d: Any = "", attribute: Any = None) -> Any:
    values = meter.bounded_list(values)
    meter.charge(_sizes(meter, values) + len(values) * _size(meter, d))
    return values


def _replace_filter(meter: Meter, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
    _replaced(meter, text, old, new, count)
    return text


def _items_filter(meter: Meter, values: Any, *_: Any, **__: Any) -> Any:
    return meter.bounded_list(values)


def _sorted(meter: Meter, values: Any, *_: Any, **__: Any) -> Any:
    values = meter.bounded_list(values)
    meter.measure(values)
    return values


def _summed(meter: Meter, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    values = meter.bounded_list(values)
    if not isinstance(start, int | float):  # lists are added pair by pair
        meter.charge(meter.measure(start) + len(values) * meter.measure(values))
    return values


def _indented(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    size = width if isinstance(width, int) else len(width)
    num_lines = _num_lines(text) if isinstance(text, str) else 1 + _size(meter, text)
    meter.charge(_size(meter, text) + num_lines * max(0, size))
    return text


def _wide_filter(meter: Meter, text: Any, width: int = 80) -> Any:
    _wide(meter, text, width)
    return text


def _truncated(meter: Meter, text: Any, length: int = 255, killwords: bool = False, end: str = "...", *_: Any) -> Any:
    meter.charge(_size(meter, text) + len(end))
    return text


def _wrapped(
    meter: Meter, text: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> Any:
    if _size(meter, text) > SLOW_CHARS:
        raise SecurityError("a text is too long to wrap")
    meter.charge((len(text) + 1) * (1 + len(wrapstring or "\n")))
    return text


def _number(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_NUMBER_CHARS:
        raise SecurityError("a number is too long")
    return value


def _rounded(meter: Meter, value: Any, precision: int = 0, *_: Any, **__: Any) -> Any:
    if abs(precision) > MAX_PRECISION:
        raise SecurityError("a precision is too large")
    return value


def _batched(meter: Meter, values: Any, size: int, fill_with: Any = None, **__: Any) -> Any:
    meter.charge_items(size)
    return meter.bounded_list(values)


def _slow_text(meter: Meter, text: Any, *_: Any, **__: Any) -> Any:
    if _size(meter, text) > SLOW_CHARS:
        raise SecurityError("a text is too long")
    return _text(ESCAPE_GROWTH)(meter, text)


_FILTERS: Mapping[str, Check] = {
    **dict.fromkeys(
        ("abs", "attr", "count", "d", "default", "filesizeformat", "first", "items", "last", "length", "map", "max",
         "min", "reject", "rejectattr", "select", "selectattr", "unique"),
        _constant_size,
    ),
    **dict.fromkeys(("capitalize", "lower", "title", "upper"), _text(CASE_GROWTH)),
    **dict.fromkeys(("e", "escape", "forceescape"), _text(ESCAPE_GROWTH)),
    **dict.fromkeys(("safe", "string", "trim", "wordcount"), _text(1)),
    **dict.fromkeys(("list", "reverse"), _items_filter),
    **dict.fromkeys(("dictsort", "groupby", "sort"), _sorted),
    **dict.fromkeys(("float", "int"), _number),
    "batch": _batched,
    "center": _wide_filter,
    "format": _format,
    "indent": _indented,
    "join": _join_filter,
    "replace": _replace_filter,
    "round": _rounded,
    "slice": _batched,
    "striptags": _slow_text,
    "sum": _summed,
    "truncate": _truncated,
    "urlencode": _text(URL_GROWTH),
    "wordwrap": _wrapped,
}  # fmt: skip


def bounded_filters(meter: Callable[[], Meter]) -> dict[str, Callable[..., Any]]:
    """Return bounded Jinja filters by name; `meter` returns the current render's meter."""
    return {name: _bounded(FILTERS[name], check, meter) for name, check in _FILTERS.items()}


def _bounded(run: Callable[..., Any], check: Check, meter: Callable[[], Meter]) -> Callable[..., Any]:
    num_leading = _PassArg.from_obj(run) is not None  # a context precedes the value

    @functools.wraps(run)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        leading, (value, *rest) = args[:num_leading], args[num_leading:]
        return run(*leading, check(meter(), value, *rest, **kwargs), *rest, **kwargs)

    return bounded


def bounded_tojson(meter: Callable[[], Meter]) -> Callable[..., str]:
    """Return Hugging Face's `tojson`: plain JSON, not escaped for HTML."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        marks = [*(separators or ()), indent if isinstance(indent, str) else " " * min(indent or 0, MAX_INDENT + 1)]
        if max(map(len, marks)) > MAX_INDENT:
            raise SecurityError("an indent or a separator is too long")
        meter().charge(meter().measure(value) * (JSON_GROWTH if ensure_ascii else JSON_GROWTH // 2))
        how: dict[str, Any] = {
            "ensure_ascii": ensure_ascii,
            "indent": indent,
            "separators": separators,
            "sort_keys": sort_keys,
        }
        if indent is None and not separators:
            return json.dumps(value, **how)
        pieces, num_chars = [], 0
        for piece in json.JSONEncoder(**how).iterencode(value):  # an indent's size is known only while encoding
            num_chars += len(piece)
            meter().charge(len(piece))
            if num_chars > meter().max_chars:
                raise SecurityError("a value is too large")
            pieces.append(piece)
        return "".join(pieces)

    return tojson
