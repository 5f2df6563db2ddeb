"""Errors that several modules send to clients."""

from __future__ import annotations

import logging
import secrets

from model.errors import GrammarError
from service.errors import ENDINGS, STORAGE_FULL, STORAGE_QUOTA_EXCEEDED, EndReason, RequestError
from service.observability.logs import fields
from service.queue.records import StorageFull

log = logging.getLogger("quire.gateway")

RETRY_AFTER_S = 2
STORAGE_RETRY_AFTER_S = 60
"""Long, because stored data expires slowly."""
UNAVAILABLE = "unavailable"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def refusal(param: str, why: str) -> RequestError:
    """Return the 400 for an invalid value."""
    return RequestError(400, f"'{param}' {why}.", param=param)


def missing(param: str) -> RequestError:
    return RequestError(400, f"'{param}' is required.", param=param, code="missing_required_parameter")


def grammar_refusal(error: GrammarError, param: str) -> RequestError:
    return RequestError(400, f"'{param}': {error}", param=param, code="invalid_grammar")


def too_long(max_model_len: int, param: str, num_tokens: tuple[int, int] | None = None) -> RequestError:
    """Return the 400 for a request that exceeds the model's context.

    `num_tokens`: (prompt, output); None: the prompt alone exceeds the context and was not counted. The message begins
    with OpenAI's words, by which clients recognize it.
    """
    asked = "the prompt is longer"
    if num_tokens is not None:
        asked = f"the request asks for {sum(num_tokens)}: {num_tokens[0]} in the prompt and {num_tokens[1]} of output"
    message = f"This model's maximum context length is {max_model_len} tokens; {asked}."
    return RequestError(400, message, param=param, code=CONTEXT_LENGTH_EXCEEDED)


def too_costly(max_tokens: int) -> RequestError:
    """Return the 400 for a request above `--max-request-tokens`."""
    message = f"The prompts and the tokens asked for, over all choices, exceed {max_tokens} tokens."
    return RequestError(400, message, param="max_tokens", code="request_too_large")


def draining() -> RequestError:
    message = "The server is shutting down."
    return RequestError(503, message, "server_error", code="draining", retry_after_s=RETRY_AFTER_S)


def unavailable() -> RequestError:
    message = "The queue is not available now."
    return RequestError(503, message, "server_error", code=UNAVAILABLE, retry_after_s=RETRY_AFTER_S)


def failure(reason: EndReason) -> RequestError:
    """Return the error for a job that ended with `reason`."""
    ending = ENDINGS[reason]
    kind = "invalid_request_error" if ending.status < 499 else "server_error"
    return RequestError(ending.status, ending.message, kind, code=reason.value)


def storage_refusal(full: StorageFull) -> RequestError:
    """Return the 429 for a tenant's storage quota, or the 503 for the gateway's."""
    if full.of_tenant:
        message = (
            f"Storage quota: {full.num_bytes} of {full.max_bytes} bytes are taken by your files, batches and stored "
            "responses or by records of your requests, and this would exceed them (delete files or responses, send "
            "'store': false, or wait until they expire)."
        )
        code, retry_after_s = STORAGE_QUOTA_EXCEEDED, STORAGE_RETRY_AFTER_S
        return RequestError(429, message, "rate_limit_error", code=code, retry_after_s=retry_after_s)
    message = "The memory for stored data is full; the rest is the queue's own (try again later, or store less)."
    return RequestError(503, message, "server_error", code=STORAGE_FULL, retry_after_s=STORAGE_RETRY_AFTER_S)


def incident(error: BaseException, where: str) -> RequestError:
    """Log a bug's traceback under a random number; return a 500 that shows only the number."""
    number = secrets.token_hex(6)
    log.error("bug %s", fields(incident=number, where=where), exc_info=error)
    return RequestError(500, f"Internal error, incident {number}.", "server_error", code="internal_error")
