"""The messages in Redis: frozen, versioned msgpack maps; README.md lists their fields.

Token ids are packed little-endian uint32, so that arrays stay small. Events are msgspec structs, for speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from model.sampling_params import SamplingParams
from service.errors import EndReason

VERSION = 1
MAX_PARTS = 33
"""One event holds parts of the prompt and of 32 branches (the limit of `--max-n`), or as many choices."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """An accepted request in tokens, written by a gateway, executed by a worker."""

    job_id: str  # 26 characters of Crockford base 32; `.1`, `.2`, ... follow for further prompts
    tenant: str
    prompt: bytes  # uint32[num_prompt_tokens]
    sampling: SamplingParams
    submitted_at_s: float  # queue time, Unix seconds
    deadline_s: float | None = None  # queue time, Unix seconds
    feed: str  # of the gateway that follows its events
    priority: int = 0  # among its tenant's jobs; lower goes first
    is_batch: bool = False  # waits in the lowest lane
    traceparent: str | None = None  # W3C, of the waiting span
    model: str | None = None  # requested name; only its workers run the job


class TokenLogprobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Log-probabilities of n tokens, with K alternatives each."""

    chosen: bytes  # float32[n]
    top_ids: bytes  # uint32[n * K]
    top: bytes  # float32[n * K]


class Usage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """New tokens of one branch, or its end, or both."""

    branch: int = 0
    tokens: bytes = b""  # uint32[n]
    logprobs: TokenLogprobs | None = None
    end: EndReason | None = None  # STOP or LENGTH: the branch is over
    is_prompt: bool | None = None  # true: the prompt's tokens from its second on, before all branches


class Event(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="v",
    tag=VERSION,
    gc=False,
):
    """Parts of a job's branches, or its end, or both. A job's numbers run 1, 2, 3, ... without gap or repeat."""

    job_id: str
    number: int
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()
    end: EndReason | None = None  # of the job: exactly in its last event
    usage: Usage | None = None  # so far; in the first event and with `end`
    # with a successful `end`: the n branches to answer with, best first
    choices: Annotated[tuple[int, ...], Meta(max_length=MAX_PARTS)] = ()
    embedding: bytes | None = None  # float32[hidden], with a successful `end`, if requested


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Cancels a job or one of its branches."""

    job_id: str
    reason: EndReason  # CANCELLED, DEADLINE, or STOP at a stop string
    branch: int | None = None  # None: the job


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Data that a gateway needs to answer or end an accepted request. Its jobs, one per prompt, are `request_id`,
    `<request_id>.1`, ..."""

    request_id: str
    tenant: str
    endpoint: str
    outline: bytes  # the JSON body with the shortest possible prompts
    digest: bytes  # SHA-256 of endpoint and whole body
    created_s: float  # queue time, Unix seconds
    deadline_s: float  # queue time, Unix seconds
    num_prompt_tokens: bytes  # uint32[num_jobs]
    prompt_texts: tuple[str, ...] = ()  # if the answer echoes them
    first_ids: bytes = b""  # uint32[num_jobs], first prompt tokens, if prompt logprobs are requested
    stays: bool = False  # it outlives its client


@dataclass(frozen=True, kw_only=True)
class WorkerCard:
    """A worker's state, written with each heartbeat."""

    worker_id: str
    model: str
    ready: bool  # after a first generation, until it drains
    max_model_len: int
    num_blocks: int
    block_size: int
    beat_at_s: float  # queue time, set by the queue
    blocks: bytes = b""  # block map of the pool (service/engine/kv/block_pool.py), if requested
    host_blocks: bytes = b""  # of the host cache
    stats: dict[str, float] = field(default_factory=dict)  # by name in observability/worker_metrics.py


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A job that was ended because engines died of it."""

    job_id: str
    job: bytes  # the Job as accepted
    deaths: int  # engine deaths in flight; at the last it ran alone
    cause: str  # of the last death
    buried_at_s: float  # queue time, Unix seconds


@dataclass(frozen=True, kw_only=True)
class IngressJob:
    """A foreign producer's request: an OpenAI body and its endpoint. The body holds JSON types; a `prompt` of token ids
    may also be packed (bin, uint32), and is a list once decoded."""

    v: int
    id: str  # the producer's name for the job, [A-Za-z0-9_.-]{1,64}
    endpoint: str  # "/v1/completions" | "/v1/chat/completions"
    body: dict[str, Any]
    traceparent: str | None = None  # W3C; ignored if malformed


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply to a foreign producer: more text, or the end with `done`."""

    id: str  # the producer's name for the job
    number: int  # 1, 2, 3, ... within the job
    index: int = 0  # choice, below n
    text: str = ""
    finish_reason: str | None = None  # OpenAI's, in a choice's last reply
    tool_calls: list[dict[str, Any]] | None = None  # OpenAI's objects, in a choice's last reply
    usage: Usage | None = None  # with `done`, on success
    error: dict[str, Any] | None = None  # OpenAI's object, with `done`, on failure
    done: bool = False  # the last reply
