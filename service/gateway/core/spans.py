"""Spans of requests at the doors, in the words of OpenTelemetry's conventions for HTTP and for generative AI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from service.errors import ENDINGS, EndReason, RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.generation.request import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, GenerationRequest
from service.gateway.generation.response_stream import ResponseStream
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

TRACED = "/v1/"
"""Routes under it have spans; nobody wants those of probes and of pages that ask every second."""

OPERATIONS = {COMPLETIONS: "text_completion", CHAT: "chat", RESPONSES: "chat", EMBEDDINGS: "embeddings"}
PROVIDER = "quire"


@contextmanager
def followed(tracing: Tracing, http: web.Request, route: str) -> Iterator[Callable[[int], None]]:
    """Inside, spans and log lines belong to the client's trace, or to one that begins here. To be called with the
    status of the answer."""
    name = f"{http.method} {route}"
    attributes: Attributes = {}
    if tracing.is_on:
        attributes = {"http.request.method": http.method, "http.route": route, "url.scheme": http.scheme}
    theirs = read_traceparent(http.headers.get("traceparent"))
    span = tracing.start_span(name, theirs, attributes, kind="server")
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
def admission(tracing: Tracing) -> Iterator[Callable[[AcceptedRequest], None]]:
    """The span of admission; call the yielded function with the accepted request."""
    span, failure = tracing.start_span("admission", current_traceparent(), {}), "cancelled"

    def admitted(accepted: AcceptedRequest) -> None:
        add_log_context(request=accepted.request_id)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("admitted %s", fields(request=accepted.request_id, prompt_tokens=sum(accepted.num_prompt_tokens)))
        if tracing.is_on:
            span.set_attributes(
                {"quire.request": accepted.request_id, "gen_ai.usage.input_tokens": sum(accepted.num_prompt_tokens)}
            )

    try:
        yield admitted
        failure = None
    except RequestError as error:
        failure = error.code or str(error.status)
        raise
    finally:
        span.end(failure)


def begin_generation(tracing: Tracing, accepted: AcceptedRequest) -> Span:
    """The span of all that a request's jobs do, until its answer is told."""
    operation = OPERATIONS[accepted.request.endpoint]
    attributes = _asked(accepted, operation) if tracing.is_on else {}
    return tracing.start_span(
        " ".join(filter(None, (operation, accepted.request.model))), current_traceparent(), attributes
    )


def end_generation(span: Span, stream: ResponseStream, reason: EndReason, refused: str | None) -> None:
    """`reason`: why it ends, where it does not by itself; `refused`: why its jobs were, or failed."""
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


def _asked(accepted: AcceptedRequest, operation: str) -> Attributes:
    request: GenerationRequest = accepted.request
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
    """Of 0..2^64-1 the number from -2^63 to 2^63-1 that a client writes for it, and that an attribute can hold."""
    return seed - (1 << 64) if seed is not None and seed >= 1 << 63 else seed
