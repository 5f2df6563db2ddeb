"""Request spans, named by OpenTelemetry's conventions for HTTP and generative AI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import ENDINGS, EndReason, RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.request import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from service.gateway.core.response_stream import ResponseStream
from service.observability.logs import add_log_context, fields, log_context
from service.observability.tracing import (
    Attributes,
    Span,
    Tracing,
    current_traceparent,
    read_traceparent,
    trace_id,
    use_traceparent,
)

log = logging.getLogger("quire.gateway")

OPERATIONS = {
    COMPLETIONS: "text_completion",
    CHAT: "chat",
    RESPONSES: "chat",
    MESSAGES: "chat",
    EMBEDDINGS: "embeddings",
}
PROVIDER = "quire"


@contextmanager
def http_span(
    tracing: Tracing, *, method: str, route: str, scheme: str, traceparent: str | None
) -> Iterator[Callable[[int], None]]:
    """Open an HTTP request's span; yield a function that takes the response's status.

    Spans and log lines inside belong to the trace in `traceparent`, or to a new one.
    """
    attributes: Attributes = {}
    if tracing.is_on:
        attributes = {"http.request.method": method, "http.route": route, "url.scheme": scheme}
    span = tracing.start_span(f"{method} {route}", read_traceparent(traceparent), attributes, kind="server")
    failure = None

    def answered(status: int) -> None:
        nonlocal failure
        span.set_attributes({"http.response.status_code": status})
        if log.isEnabledFor(logging.DEBUG):
            log.debug("answered %s", fields(route=route, status=status))
        failure = str(status) if status >= 499 else None

    try:
        with use_traceparent(span.traceparent), log_context(trace=trace_id(span.traceparent)):
            yield answered
    finally:
        span.end(failure)


@contextmanager
def admission_span(tracing: Tracing) -> Iterator[Callable[[AcceptedRequest], None]]:
    span = tracing.start_span("admission", current_traceparent(), {})
    failure: str | None = "cancelled"

    def admitted(accepted: AcceptedRequest) -> None:
        request_id, num_tokens = accepted.request_id, sum(accepted.num_prompt_tokens)
        add_log_context(request=request_id, client_id=accepted.client_id)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("admitted %s", fields(request=request_id, prompt_tokens=num_tokens))
        if tracing.is_on:
            span.set_attributes({"quire.request": request_id, "gen_ai.usage.input_tokens": num_tokens})

    try:
        yield admitted
        failure = None
    except RequestError as error:
        failure = error.code or str(error.status)
        raise
    finally:
        span.end(failure)


def begin_generation(tracing: Tracing, accepted: AcceptedRequest) -> Span:
    """Begin the span that covers a request's jobs."""
    operation = OPERATIONS[accepted.request.endpoint]
    attributes = _request_attributes(accepted, operation) if tracing.is_on else {}
    return tracing.start_span(
        " ".join(filter(None, (operation, accepted.request.model))), current_traceparent(), attributes
    )


def end_generation(span: Span, stream: ResponseStream, reason: EndReason, refused: str | None) -> None:
    """End the span. `reason`: for jobs that have not ended; `refused`: the error's code."""
    reasons = stream.reasons(reason)
    outcome = stream.outcome
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": [ENDINGS[each].finish_reason or each.value for each in reasons],
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
        }
    )
    failures = [each.value for each in reasons if ENDINGS[each].finish_reason is None]
    span.end(refused or (failures[0] if failures else None))


def _request_attributes(accepted: AcceptedRequest, operation: str) -> Attributes:
    request = accepted.request
    params = request.sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": accepted.request_id,
        "gen_ai.request.choice.count": None if params.n == 1 else params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": _signed(params.seed),
        "gen_ai.request.stop_sequences": list(request.stop) or None,
        "quire.tenant": accepted.tenant,
        "quire.stream": request.stream,
        "quire.batch": request.is_batch or None,
    }


def _signed(seed: int | None) -> int | None:
    """Map 0..2^64-1 to signed 64-bit integers, the range of an attribute."""
    return seed - (1 << 64) if seed is not None and seed >= 1 << 63 else seed
