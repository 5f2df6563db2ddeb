"""W3C trace context and spans, from the client's header through the queue to the worker.

Without the extra `otel` or an OTLP endpoint there are no spans, but a client's trace is still propagated and logged.
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
"""None values are dropped."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?")
_traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)


class Span(Protocol):
    @property
    def traceparent(self) -> str | None:
        """Traceparent for child spans; None without a trace."""

    def set_attributes(self, attributes: Attributes) -> None: ...

    def end(self, failure: str | None = None, at_s: float | None = None) -> None:
        """End the span; call once. `failure`: the `error.type`; `at_s`: Unix seconds, default now."""


class Tracing(Protocol):
    @property
    def is_on(self) -> bool: ...

    def start_span(
        self,
        name: str,
        parent: str | None,
        attributes: Attributes,
        *,
        kind: Kind = "internal",
        at_s: float | None = None,
    ) -> Span:
        """Return a child of `parent` (a traceparent), or the root of a new trace."""

    def close(self) -> None:
        """Flush; may take seconds."""


@dataclass(frozen=True)
class _NoSpan:
    traceparent: str | None

    def set_attributes(self, attributes: Attributes) -> None:
        pass

    def end(self, failure: str | None = None, at_s: float | None = None) -> None:
        pass


class NoTracing:
    is_on = False

    def start_span(self, name: str, parent: str | None, attributes: Attributes, **how: Any) -> Span:
        return _NoSpan(parent)

    def close(self) -> None:
        pass


NO_TRACING = NoTracing()


def open_tracing(role: str, environ: Mapping[str, str]) -> Tracing:
    """Open tracing as configured by OpenTelemetry's variables. Raises StartupError for an invalid one."""
    if not any(environ.get(name) for name in ENDPOINTS):
        return NO_TRACING
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return NO_TRACING
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        log.warning("no spans: an OTLP endpoint is set, but the extra is missing (pip install 'quire[otel]')")
        return NO_TRACING
    for name in PROTOCOLS:
        if environ.get(name, PROTOCOL) != PROTOCOL:
            raise StartupError(f"{name}: {environ[name]!r} is not supported ({PROTOCOL})")
    for name in ENDPOINTS:
        if (url := environ.get(name)) and not url.startswith(("http://", "https://")):
            raise StartupError(f"{name}: {url!r} is not supported (an http or https URL)")
    from service.observability.otel import open_otel  # imported only if needed

    try:
        return open_otel(role)
    except ValueError as error:
        raise StartupError(f"OTEL_...: a variable has a wrong value: {error}") from None


def read_traceparent(text: str | None) -> str | None:
    """Return a W3C traceparent as version 00; None if malformed."""
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None or (found[1] == "00" and found[3]):
        return None
    return f"00-{found[2]}"


def trace_id(traceparent: str | None) -> str | None:
    return None if traceparent is None else traceparent[3:35]


def current_traceparent() -> str | None:
    return _traceparent.get()


@contextmanager
def use_traceparent(traceparent: str | None) -> Iterator[None]:
    """Make this span the parent of spans in this task and in tasks started inside."""
    token = _traceparent.set(traceparent)
    try:
        yield
    finally:
        _traceparent.reset(token)
