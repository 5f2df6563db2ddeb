"""A request's trace in W3C's terms, from the client's header through the queue to the worker, and the spans in it.

A span is known by its traceparent, which is all that the next part needs to begin one below it. Without the extra
`otel` or an endpoint to send them to, no spans are made; a client's own trace is passed on and logged all the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Protocol

from service.errors import StartupError

log = logging.getLogger("quire.tracing")

Kind = Literal["internal", "server", "consumer"]
Attributes = Mapping[str, Any]
"""Those that are None are left out."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?")
_above: ContextVar[str | None] = ContextVar("traceparent", default=None)


class Span(Protocol):
    traceparent: str | None
    """For those below it; None where there is no trace."""

    def note(self, attributes: Attributes) -> None: ...

    def end(self, failure: str | None = None, at_s: float | None = None) -> None:
        """To be called once. `failure`: a short word for what went wrong; `at_s`: Unix seconds, now if not given."""


class Tracing(Protocol):
    is_on: bool

    def begin(
        self,
        name: str,
        above: str | None,
        attributes: Attributes,
        *,
        kind: Kind = "internal",
        at_s: float | None = None,
    ) -> Span:
        """A span below the one with the traceparent `above`, or at the top of a trace of its own."""

    def close(self) -> None:
        """Sends what has not been sent; may take seconds."""


@dataclass(frozen=True)
class _NoSpan:
    traceparent: str | None

    def note(self, attributes: Attributes) -> None:
        pass

    def end(self, failure: str | None = None, at_s: float | None = None) -> None:
        pass


class NoTracing:
    is_on = False

    def begin(self, name: str, above: str | None, attributes: Attributes, **how: Any) -> Span:
        return _NoSpan(above)

    def close(self) -> None:
        pass


NO_TRACING = NoTracing()


def open_tracing(part: str, environ: Mapping[str, str]) -> Tracing:
    """What the environment asks for, in OpenTelemetry's own variables. Raises StartupError for what cannot be had."""
    if not any(environ.get(name) for name in ENDPOINTS):
        return NO_TRACING
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return NO_TRACING
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        log.warning("an OTLP endpoint is set, but no spans are made: pip install 'quire[otel]'")
        return NO_TRACING
    for name in PROTOCOLS:
        if environ.get(name, PROTOCOL) != PROTOCOL:
            raise StartupError(f"{name}: spans are sent as {PROTOCOL} only")
    from service.observability.otel import exporting  # the gate: nobody else pays for loading it

    return exporting(part)


def read_traceparent(text: str | None) -> str | None:
    """A W3C traceparent, as version 00; None for one that is not well formed, which counts as none."""
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None or (found[1] == "00" and found[3]):
        return None
    return f"00-{found[2]}"


def trace_id(traceparent: str | None) -> str | None:
    return None if traceparent is None else traceparent[3:35]


def above() -> str | None:
    """The traceparent under which the running task works."""
    return _above.get()


@contextmanager
def below(traceparent: str | None) -> Iterator[None]:
    """Inside, this task and those that it starts work under that span."""
    token = _above.set(traceparent)
    try:
        yield
    finally:
        _above.reset(token)
