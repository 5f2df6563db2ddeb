"""The Jinja environment of chat templates: Hugging Face's, with time and size limits.

Each loop iteration and each operation that creates a value is charged in advance. Unbounded functions are removed:
`lipsum`, and all that `template_bounds` does not list.
"""

from __future__ import annotations

import threading
import types
from _string import formatter_field_name_split  # type: ignore[import-not-found]  # CPython's, not in typeshed
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from model.text.template_bounds import (
    ITEM_CHARS,
    REPR_GROWTH,
    Meter,
    RenderLimits,
    bounded_filters,
    bounded_tojson,
    check_printf,
    check_spec,
    method_check,
)

MAX_EXPONENT = 64
MAX_TIME_FORMAT_CHARS = 200


class Refusal(TemplateError):
    """The template called raise_exception."""


class GenerationTag(Extension):
    """Renders the content of `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class MeteredGenerator(CodeGenerator):
    """Replaces Jinja's inline operations by environment calls."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        timed_iter = nodes.EnvironmentAttribute("timed_iter")
        node.iter = nodes.Call(timed_iter, [node.iter], [], None, None).set_lineno(node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.check_time() or ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_charged(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_charged(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._write_charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._write_charged(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _write_charged(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.charged(")
        visit(node, frame)
        self.write(")")


class BoundedFormatter(Formatter):
    def __init__(self, sandbox: TemplateSandbox) -> None:
        self._sandbox = sandbox
        self._num_chars = 0

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        first, rest = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._sandbox.getattr(value, name) if is_attribute else self._sandbox.getitem(value, name)
        return value, first

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion is not None:
            self._sandbox.meter.charge(REPR_GROWTH * self._sandbox.meter.measure(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_spec(format_spec)
        meter = self._sandbox.meter
        if not isinstance(value, str):
            meter.charge(REPR_GROWTH * meter.measure(value))
        text = super().format_field(value, format_spec)
        self._num_chars += len(text)
        meter.charge(len(text))
        if self._num_chars > meter.max_chars:
            raise SecurityError("a value is too large")
        return text


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Environment shared by all threads; each render has its own meter."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))
    code_generator_class = MeteredGenerator

    def __init__(self, limits: RenderLimits, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._checked_output,
            optimized=False,
        )
        self.limits = limits
        self._thread = threading.local()
        self.filters = bounded_filters(lambda: self.meter)
        self.filters["tojson"] = bounded_tojson(lambda: self.meter)
        del self.globals["lipsum"]
        self.globals["dict"] = lambda *args, **kwargs: self.charged(dict(*map(self.meter.bounded_list, args), **kwargs))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form[:MAX_TIME_FORMAT_CHARS])

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Start this thread's meter; exceeding its limits raises SecurityError."""
        self._thread.meter = Meter(self.limits)
        try:
            yield
        finally:
            del self._thread.meter

    @property
    def meter(self) -> Meter:
        meter: Meter = self._thread.meter
        return meter

    def check_time(self) -> None:
        self._thread.meter.check_time()

    def timed_iter(self, values: Iterable[Any]) -> Iterator[Any]:
        return self.meter.timed_iter(values)

    def charged(self, value: Any) -> Any:
        self.meter.charge(self.meter.measure(value))
        return value

    def join_texts(self, parts: tuple[Any, ...]) -> str:
        """Return `a ~ b ~ ...`."""
        meter = self.meter
        meter.charge(sum(len(part) if isinstance(part, str) else REPR_GROWTH * meter.measure(part) for part in parts))
        return "".join(map(str, parts))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, types.BuiltinMethodType) and not isinstance(owner, types.ModuleType):
            check = method_check(owner, obj.__name__)
            if check is None:
                raise SecurityError("the method is not allowed in templates")
            if obj.__name__ == "join" and args:
                args = (self.meter.bounded_list(args[0]), *args[1:])
            check(self.meter, owner, *args, **{name: value for name, value in kwargs.items() if name[0] != "_"})
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, type):
            return False
        return not isinstance(value, types.BuiltinMethodType) or method_check(obj, attr) is not None

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        is_method = isinstance(value, types.MethodType | types.BuiltinMethodType)
        if not is_method or value.__name__ not in ("format", "format_map") or not isinstance(value.__self__, str):
            return None
        if isinstance(value.__self__, Markup):
            raise SecurityError("format is not allowed on texts marked as safe")

        def formatted(*args: Any, **kwargs: Any) -> str:
            self.meter.charge(len(value.__self__))
            formatter = BoundedFormatter(self)
            if value.__name__ == "format_map":
                return formatter.vformat(value.__self__, (), args[0])
            return formatter.vformat(value.__self__, args, kwargs)

        return formatted

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        meter.check_time()
        for value in (left, right):
            if isinstance(value, int):
                meter.check_int(value)
        if operator == "+":
            meter.charge(_length(left) + _length(right))
        elif operator == "*":
            meter.charge(_length(left) * _times(right) + _length(right) * _times(left))
        elif operator == "**" and not (abs(left) <= self.limits.max_chars and abs(right) <= MAX_EXPONENT):
            raise SecurityError("a power is too large")
        elif operator == "%":
            check_printf(meter, left, right)
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self.meter.charge(sum(map(len, parts)))
        return "".join(parts)

    @pass_context  # so that Jinja does not call it on constants at compile time
    def _checked_output(self, context: Context, value: Any) -> Any:
        if not isinstance(value, str):
            self.meter.charge(REPR_GROWTH * self.meter.measure(value))
        return value


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value) * (5 if isinstance(value, Markup) else 1)
    return len(value) * ITEM_CHARS if isinstance(value, list | tuple | bytes) else 0


def _times(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _raise_exception(message: str) -> None:
    raise Refusal(message)
