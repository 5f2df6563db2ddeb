"""The methods and filters that a chat template may use, each with a bound on its output that is known before it runs.

Others are refused: each might turn a few characters into gigabytes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.filters import FILTERS
from jinja2.sandbox import SecurityError
from jinja2.utils import _PassArg
from markupsafe import Markup

from model.text.template_meter import MAX_ITEMS, REPR_GROWTH, Meter

CASE_GROWTH = 3  # "ΐ".upper() has three characters
ESCAPE_GROWTH = 5  # &#34;
URL_GROWTH = 12
JSON_GROWTH = 12  # \ud83d\ude00
MAX_FIELD_DIGITS = 4
MAX_INDENT = 64
MAX_PRECISION = 300
MAX_NUMBER_CHARS = 4000
SLOW_CHARS = 1 << 20  # for operations of a microsecond or more per character
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"

_WIDE_FIELD = re.compile(rf"\d{{{MAX_FIELD_DIGITS + 1},}}|\*")
_DIGITS = re.compile(r"\d+")
_PRINTF = re.compile(r"%(?P<name>\([^)]{0,200}(?P<end>\))?)?(?P<width>[^a-zA-Z%]*)(?P<kind>[a-zA-Z%])")

Check = Callable[..., Any]
"""Takes a Meter and the arguments. Raises SecurityError. A filter's check returns the value to filter."""


def _size(meter: Meter, value: Any) -> int:
    """Return the characters of a value written out."""
    if isinstance(value, str):
        return len(value) * (ESCAPE_GROWTH if isinstance(value, Markup) else 1)
    return REPR_GROWTH * meter.weigh(value)


def _sizes(meter: Meter, values: Any) -> int:
    """Return the characters of several values written out in sequence."""
    values = list(values)
    if any(isinstance(value, Markup) for value in values):
        return ESCAPE_GROWTH * sum(_size(meter, value) for value in values)
    return sum(len(value) if isinstance(value, str) else _size(meter, value) for value in values)


def _wide(meter: Meter, text: str, width: int = 80, *_: Any) -> None:
    meter.make(_size(meter, text) + max(0, width))


def _text(growth: int) -> Check:
    def check(meter: Meter, text: Any, *_: Any, **__: Any) -> Any:
        meter.make(growth * _size(meter, text))
        return text

    return check


def _look(meter: Meter, value: Any, *_: Any, **__: Any) -> Any:
    meter.tick()
    return value


def _replaced(meter: Meter, text: Any, old: Any, new: Any, count: int | None = -1) -> None:
    old, added = str(old) if isinstance(old, str) else "", _size(meter, new)
    text = text if isinstance(text, str) else " " * _size(meter, text)
    found = text.count(old) if old else len(text) + 1
    times = found if count is None or count < 0 else min(found, count)
    meter.make(_size(meter, text) + times * added)


def _split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    most = MAX_ITEMS
    if sep:
        most = text.count(sep) + 1
    elif len(text) // 2 >= MAX_ITEMS:
        most = sum(1 for _ in re.finditer(r"\S+", text))
    else:
        most = len(text) // 2 + 1
    meter.make_items(min(most, maxsplit + 1) if maxsplit >= 0 else most)
    meter.make(len(text))


def _lines(meter: Meter, text: str, *_: Any) -> None:
    meter.make_items(_num_lines(text))
    meter.make(len(text))


def _num_lines(text: str) -> int:
    return 1 + sum(text.count(end) for end in LINE_ENDS)


def _joined(meter: Meter, between: str, values: Any) -> None:
    if hasattr(values, "__next__"):
        raise SecurityError("join wants a list")
    num_items = len(values)
    meter.make_items(num_items)
    meter.make(_sizes(meter, values) + num_items * _size(meter, between))


def _tabs(meter: Meter, text: str, tabsize: int = 8) -> None:
    meter.make(len(text) + text.count("\t") * max(0, tabsize))


def _translated(meter: Meter, text: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise SecurityError("translate wants a dict")
    meter.make(len(text) * max((len(value) for value in table.values() if isinstance(value, str)), default=1))


def _copied(meter: Meter, value: Any) -> None:
    meter.make_items(len(value))


_METHODS: Mapping[type, Mapping[str, Check]] = {
    str: {
        **dict.fromkeys(
            ("count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
             "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "rfind", "rindex",
             "startswith"),
            _look,
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
    dict: {**dict.fromkeys(("get", "items", "keys", "values"), _look), "copy": _copied},
    list: {**dict.fromkeys(("count", "index"), _look), "copy": _copied},
    tuple: dict.fromkeys(("count", "index"), _look),
    range: dict.fromkeys(("count", "index"), _look),
    float: {"is_integer": _look},
    int: {"bit_length": _look},
}  # fmt: skip


def check_of_method(owner: Any, name: str) -> Check | None:
    """Return the check of a built-in value's method; None if templates may not call it."""
    for kind, checks in _METHODS.items():
        if isinstance(owner, kind):
            return checks.get(name)
    return None


def check_printf(meter: Meter, form: Any, values: Any) -> None:
    """Bound `form % values`."""
    if not isinstance(form, str):
        return
    num_chars, times, growth = _size(meter, form), 1, ESCAPE_GROWTH if isinstance(form, Markup) else 1
    for field in _PRINTF.finditer(form):
        if field["name"] and not field["end"]:
            raise SecurityError("the name of a field is too long")
        check_spec(field["width"])
        num_chars += sum(map(int, _DIGITS.findall(field["width"])))
        times += field["name"] is not None  # a mapping's values may be written repeatedly
        growth = max(growth, REPR_GROWTH if field["kind"] in "ra" else 1)
        meter.tick()
    shown = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
    meter.make(num_chars + growth * times * _sizes(meter, shown))


def check_spec(spec: str) -> None:
    """Bound the width and precision of a field."""
    if _WIDE_FIELD.search(spec):
        raise SecurityError("a field is too wide")


def _format(meter: Meter, form: Any, *args: Any, **kwargs: Any) -> Any:
    check_printf(meter, form, kwargs or args)
    return form


def _join_filter(meter: Meter, values: Any, d: Any = "", attribute: Any = None) -> Any:
    values = meter.listed(values)
    meter.make(_sizes(meter, values) + len(values) * _size(meter, d))
    return values


def _replace_filter(meter: Meter, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
    _replaced(meter, text, old, new, count)
    return text


def _items_filter(meter: Meter, values: Any, *_: Any, **__: Any) -> Any:
    return meter.listed(values)


def _sorted(meter: Meter, values: Any, *_: Any, **__: Any) -> Any:
    values = meter.listed(values)
    meter.weigh(values)
    return values


def _summed(meter: Meter, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    values = meter.listed(values)
    if not isinstance(start, int | float):  # lists are added pair by pair
        meter.make(meter.weigh(start) + len(values) * meter.weigh(values))
    return values


def _indented(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    size = width if isinstance(width, int) else len(width)
    num_lines = _num_lines(text) if isinstance(text, str) else 1 + _size(meter, text)
    meter.make(_size(meter, text) + num_lines * max(0, size))
    return text


def _wide_filter(meter: Meter, text: Any, width: int = 80) -> Any:
    _wide(meter, text, width)
    return text


def _truncated(meter: Meter, text: Any, length: int = 255, killwords: bool = False, end: str = "...", *_: Any) -> Any:
    meter.make(_size(meter, text) + len(end))
    return text


def _wrapped(
    meter: Meter, text: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> Any:
    if _size(meter, text) > SLOW_CHARS:
        raise SecurityError("a text is too long to wrap")
    meter.make((len(text) + 1) * (1 + len(wrapstring or "\n")))
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
    meter.make_items(size)
    return meter.listed(values)


def _slow_text(meter: Meter, text: Any, *_: Any, **__: Any) -> Any:
    if _size(meter, text) > SLOW_CHARS:
        raise SecurityError("a text is too long")
    return _text(ESCAPE_GROWTH)(meter, text)


_FILTERS: Mapping[str, Check] = {
    **dict.fromkeys(
        ("abs", "attr", "count", "d", "default", "filesizeformat", "first", "items", "last", "length", "map", "max",
         "min", "reject", "rejectattr", "select", "selectattr", "unique"),
        _look,
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
    """Return Jinja's filters by name; `meter` returns the current rendering's meter."""
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
        meter().make(meter().weigh(value) * (JSON_GROWTH if ensure_ascii else JSON_GROWTH // 2))
        how = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
        if indent is None and not separators:
            return json.dumps(value, **how)
        pieces, num_chars = [], 0
        for piece in json.JSONEncoder(**how).iterencode(value):  # the size of indents is known only while encoding
            num_chars += len(piece)
            meter().make(len(piece))
            if num_chars > meter().max_chars:
                raise SecurityError("a value is too large")
            pieces.append(piece)
        return "".join(pieces)

    return tojson
