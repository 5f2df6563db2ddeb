"""How requests fail and how they end: one exception, one enum, one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(eq=False)
class RequestError(Exception):
    """A request that is refused, told to its sender as it stands: never put an internal value, path or repr in it."""

    status: int  # HTTP status
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


STORAGE_QUOTA_EXCEEDED = "storage_quota_exceeded"
"""Code of the 429 to a tenant whose files, batches, responses and records take all bytes that it may store."""
STORAGE_FULL = "storage_full"
"""Code of the 503 while what all tenants store leaves only the queue's own share of its memory."""


class StartupError(Exception):
    """The service cannot start as asked. Printed as one line, exit status 2."""


class EndReason(StrEnum):
    """Why a request ended. Every accepted request ends exactly once, with one of these (see ENDINGS)."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    CANCELLED = "cancelled"  # its client left or asked for it
    DEADLINE = "deadline"
    NUMERICAL_ERROR = "numerical_error"  # the model gave NaN
    TOO_LARGE = "too_large"  # can never fit the block pool
    GRAMMAR = "grammar"  # its grammar cannot be compiled, or grew beyond its limits on the way
    INVALID = "invalid"  # the worker refused the job
    SHUTDOWN = "shutdown"  # its worker was told to stop and the drain time ran out
    INTERNAL = "internal"  # a bug or a dead device
    POISONED = "poisoned"  # engines died of it; it stands among the dead letters
    LOST = "lost"  # Redis lost its data, and nobody had this request


@dataclass(frozen=True)
class Ending:
    """What a reason means at the HTTP door."""

    finish_reason: str | None  # OpenAI's word where the request succeeded
    status: int
    message: str


ENDINGS: dict[EndReason, Ending] = {
    EndReason.STOP: Ending("stop", 200, ""),
    EndReason.LENGTH: Ending("length", 200, ""),
    EndReason.CANCELLED: Ending(None, 499, "The request was cancelled."),
    EndReason.DEADLINE: Ending(None, 504, "The request ran past its deadline."),
    EndReason.NUMERICAL_ERROR: Ending(None, 500, "The model produced no valid number for this request."),
    EndReason.TOO_LARGE: Ending(None, 400, "The request needs more KV cache or more branches than this server has."),
    EndReason.GRAMMAR: Ending(None, 400, "The grammar that this request asks for is more than this server can follow."),
    EndReason.INVALID: Ending(None, 400, "The worker refused the job."),
    EndReason.SHUTDOWN: Ending(None, 503, "The server was shut down before the request ended."),
    EndReason.INTERNAL: Ending(None, 500, "The engine failed on this request."),
    EndReason.POISONED: Ending(None, 500, "The engine failed on this request again and again; it was given up."),
    EndReason.LOST: Ending(None, 503, "The queue lost this request."),
}
