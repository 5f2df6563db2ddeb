from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(eq=False)
class RequestError(Exception):
    """Refusal of a request. Every field is sent to the client: no internal values, paths or reprs."""

    status: int  # HTTP status
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


STORAGE_QUOTA_EXCEEDED = "storage_quota_exceeded"
"""Error code of a 429: the tenant's quota is full."""
STORAGE_FULL = "storage_full"
"""Error code of a 503: only the Redis memory reserved for the queue is left."""


class StartupError(Exception):
    """Failure to start. The command prints it as one line and exits with status 2."""


class EndReason(StrEnum):
    """End reasons. Every accepted request ends exactly once, with one of them."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context length
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    NUMERICAL_ERROR = "numerical_error"  # NaN in the logits
    TOO_LARGE = "too_large"  # never fits the block pool
    GRAMMAR = "grammar"  # cannot be compiled, or exceeded its limits
    ADAPTER = "adapter"  # cannot be loaded by the worker
    INVALID = "invalid"
    SHUTDOWN = "shutdown"  # its worker stopped
    INTERNAL = "internal"  # a bug or a dead device
    POISONED = "poisoned"  # killed engines; dead-lettered
    LOST = "lost"  # Redis lost its data


@dataclass(frozen=True)
class Ending:
    finish_reason: str | None  # OpenAI's finish_reason on success
    status: int
    message: str


ENDINGS: dict[EndReason, Ending] = {
    EndReason.STOP: Ending("stop", 200, ""),
    EndReason.LENGTH: Ending("length", 200, ""),
    EndReason.CANCELLED: Ending(None, 499, "The request was cancelled."),
    EndReason.DEADLINE: Ending(None, 504, "The request exceeded its deadline."),
    EndReason.NUMERICAL_ERROR: Ending(None, 500, "The model produced NaN for this request."),
    EndReason.TOO_LARGE: Ending(None, 400, "The request needs more KV cache or more branches than this server has."),
    EndReason.GRAMMAR: Ending(None, 400, "The grammar allows no text, or exceeds this server's limits."),
    EndReason.ADAPTER: Ending(None, 503, "The worker could not load the adapter."),
    EndReason.INVALID: Ending(None, 400, "The worker refused the job."),
    EndReason.SHUTDOWN: Ending(None, 503, "The server was shut down before the request ended."),
    EndReason.INTERNAL: Ending(None, 500, "The engine failed on this request."),
    EndReason.POISONED: Ending(None, 500, "The engine failed on this request repeatedly."),
    EndReason.LOST: Ending(None, 503, "The queue lost this request."),
}
