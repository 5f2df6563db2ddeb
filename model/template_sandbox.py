"""The Jinja environment of chat templates: what Hugging Face's offers, in a sandbox with bounds on time and size."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_EXPONENT = 64
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What one rendering may make and take; SecurityError beyond."""

    max_chars: int = 16 * 2**20  # of the rendered text, and of any text or list that a template multiplies
    max_s: float = 5.0


class Refusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Shared by all threads; each renders under its own deadline.

    Bounds are checked where a template computes: at calls, look-ups and products. They stop a careless template and
    most hostile ones, but memory is not metered, so templates come from the model folder only.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, limits: RenderLimits, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.limits = limits
        self._thread = threading.local()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Starts this thread's clock: what it renders inside must end within the limit, else SecurityError."""
        self._thread.deadline_s = time.monotonic() + self.limits.max_s
        try:
            yield
        finally:
            del self._thread.deadline_s

    def check_time(self) -> None:
        """Raises SecurityError once this thread's time is over; outside `timed` there is no bound."""
        deadline_s = getattr(self._thread, "deadline_s", None)
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise SecurityError("the template takes too long")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        if operator == "*" and self._num_items(left, right) > self.limits.max_chars:
            raise SecurityError("a product is too large")
        if operator == "**" and not (abs(left) <= self.limits.max_chars and abs(right) <= MAX_EXPONENT):
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
            raise SecurityError("a field is too wide")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _num_items(left: Any, right: Any) -> int:
        """How long the product of a sequence and a number is; 0 for a product of numbers."""
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                return len(sequence) * times
        return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise Refusal(message)
