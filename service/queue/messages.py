"""Messages in Redis: frozen, versioned msgpack maps (README.md). Token ids are packed little-endian uint32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from model.sampling_params import SamplingParams
from service.errors import EndReason

VERSION = 1
MAX_PARTS = 33
"""Prompt and 32 branches (limit of `--max-n`), or choices."""


@dataclass(frozen=True, kw_only=True)
class Job:
    job_id: str  # 26 characters of Crockford base 32; `.1`, ... for further prompts
    tenant: str
    prompt: bytes  # uint32[num_prompt_tokens]
    sampling: SamplingParams
    submitted_at_s: float  # queue time, Unix seconds
    deadline_s: float | None = None  # queue time, Unix seconds
    feed: str  # of its gateway
    priority: int = 0  # within its tenant; lower first
    is_batch: bool = False  # lowest lane
    traceparent: str | None = None  # W3C, of the waiting span
    model: str | None = None  # whose workers alone run it


class TokenLogprobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Log-probabilities of n tokens, K alternatives each."""

    chosen: bytes  # float32[n]
    top_ids: bytes  # uint32[n * K]
    top: bytes  # float32[n * K]


class Usage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A branch's new tokens or end."""

    branch: int = 0
    tokens: bytes = b""  # uint32[n]
    logprobs: TokenLogprobs | None = None
    end: EndReason | None = None  # STOP or LENGTH
    is_prompt: bool | None = None  # the prompt's tokens from its second on, before all branches


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
    """A job's new parts or end. Numbers run 1, 2, 3, ... without gap."""

    job_id: str
    number: int
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()
    end: EndReason | None = None  # the job's, in its last event only
    usage: Usage | None = None  # so far; in the first event and with `end`
    # the n branches to answer with, best first, with a successful `end`
    choices: Annotated[tuple[int, ...], Meta(max_length=MAX_PARTS)] = ()
    embedding: bytes | None = None  # float32[hidden], with a successful `end`, if requested


@dataclass(frozen=True, kw_only=True)
class Cancel:
    job_id: str
    reason: EndReason  # CANCELLED, DEADLINE, or STOP (a stop string)
    branch: int | None = None  # None: the job


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Data to answer a request, whose jobs, one per prompt, are `request_id`, `<request_id>.1`, ..."""

    request_id: str
    tenant: str
    endpoint: str
    outline: bytes  # JSON body with the shortest prompts
    digest: bytes  # SHA-256 of endpoint and body
    created_s: float  # queue time, Unix seconds
    deadline_s: float  # queue time, Unix seconds
    num_prompt_tokens: bytes  # uint32[num_jobs]
    prompt_texts: tuple[str, ...] = ()  # to echo
    first_ids: bytes = b""  # uint32[num_jobs], first prompt tokens, for prompt logprobs
    stays: bool = False  # outlives its client


@dataclass(frozen=True, kw_only=True)
class WorkerCard:
    worker_id: str
    model: str
    ready: bool  # generated once, not draining
    max_model_len: int
    num_blocks: int
    block_size: int
    beat_at_s: float  # queue time, by the queue
    blocks: bytes = b""  # map (service/engine/kv/block_pool.py), if requested
    host_blocks: bytes = b""  # of the host cache
    stats: dict[str, float] = field(default_factory=dict)  # observability/worker_metrics.py


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    job_id: str
    job: bytes  # the Job as accepted
    deaths: int  # in flight; at the last it ran alone
    cause: str  # of the last
    buried_at_s: float  # queue time, Unix seconds


@dataclass(frozen=True, kw_only=True)
class IngressJob:
    """A foreign producer's OpenAI body; `prompt` may be packed token ids (bin, uint32)."""

    v: int
    id: str  # the producer's, [A-Za-z0-9_.-]{1,64}
    endpoint: str  # "/v1/completions" | "/v1/chat/completions"
    body: dict[str, Any]
    traceparent: str | None = None  # W3C; ignored if malformed


@dataclass(frozen=True, kw_only=True)
class Reply:
    id: str  # the producer's
    number: int  # 1, 2, 3, ... within the job
    index: int = 0  # choice, below n
    text: str = ""
    finish_reason: str | None = None  # in a choice's last reply
    tool_calls: list[dict[str, Any]] | None = None  # OpenAI's, in a choice's last reply
    usage: Usage | None = None  # with `done`, on success
    error: dict[str, Any] | None = None  # OpenAI's, with `done`, on failure
    done: bool = False
