"""OpenTelemetry spans; imported only if an endpoint is set."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

NS_PER_S = 1_000_000_000
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "consumer": SpanKind.CONSUMER}
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan:
    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(_present(attributes))

    def end(self, failure: str | None = None, at_s: float | None = None) -> None:
        if failure is not None:
            self._span.set_attribute("error.type", failure)
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end(_ns(at_s))


class OtelTracing:
    is_on = True

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire", version("quire"))

    def start_span(
        self,
        name: str,
        parent: str | None,
        attributes: Mapping[str, Any],
        *,
        kind: str = "internal",
        at_s: float | None = None,
    ) -> OtelSpan:
        # An empty context, so that other users of OpenTelemetry do not join the trace.
        context = Context() if parent is None else _PROPAGATOR.extract({"traceparent": parent}, Context())
        return OtelSpan(
            self._tracer.start_span(
                name, context, kind=_KINDS[kind], attributes=_present(attributes), start_time=_ns(at_s)
            )
        )

    def close(self) -> None:
        self._provider.shutdown()


def open_otel(role: str) -> OtelTracing:
    """Return a tracing that sends batches from a thread, configured by OpenTelemetry's variables."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: f"quire-{role}"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracing(provider)


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * NS_PER_S)
