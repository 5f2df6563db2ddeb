"""The messages that Redis carries: frozen, versioned, msgpack maps. `README.md` beside this lists them field by field.

Token ids travel as packed little-endian uint32, so that every array in a message is small. Events, and what they are
made of, are msgspec's structs: each token is one, at four places of its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from model.sampling_params import SamplingParams
from service.errors import EndReason

VERSION = 1
MAX_PARTS = 33
"""News of the prompt and of 32 branches (`--max-n` allows no more), or so many choices, stand in one event."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One accepted request, in token terms. Written by a door, executed by a worker."""

    job_id: str  # made by the door: 26 characters of Crockford base 32; `.1`, `.2`, ... behind them for further prompts
    tenant: str
    prompt: bytes  # uint32[num_prompt_tokens]
    sampling: SamplingParams
    submitted_at_s: float  # queue time, Unix seconds
    deadline_s: float | None = None  # queue time, Unix seconds
    feed: str  # the door instance that follows this job's events
    priority: int = 0  # among its tenant's waiting jobs; lower goes first
    is_batch: bool = False  # it waits in the lowest lane
    traceparent: str | None = None  # W3C's, of the span that waits for it
    model: str | None = None  # the name under which it was asked for: no worker of another one computes it


class TokenLogprobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Log-probabilities of the tokens of one event: n tokens, K alternatives each."""

    chosen: bytes  # float32[n]
    top_ids: bytes  # uint32[n * K]
    top: bytes  # float32[n * K]


class Usage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What one branch of a job has to tell: some more tokens, or its end, or both."""

    branch: int = 0
    tokens: bytes = b""  # uint32[n]
    logprobs: TokenLogprobs | None = None
    end: EndReason | None = None  # STOP or LENGTH: nothing of this branch follows
    is_prompt: bool | None = None  # true: the tokens are the prompt's, from its second on, before all branches


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
    """Some news of a job's branches, or its end, or both. Numbers of a job run 1, 2, 3, ... without gap or repeat."""

    job_id: str
    number: int
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()
    end: EndReason | None = None  # of the whole job: exactly one event has it, the last
    usage: Usage | None = None  # so far; in the first event, and with `end`
    # with an `end` that is a success: the n branches to answer with, best first
    choices: Annotated[tuple[int, ...], Meta(max_length=MAX_PARTS)] = ()
    embedding: bytes | None = None  # float32[hidden], with an `end` that is a success, where the job asks for it


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Somebody no longer wants this job, or one branch of it."""

    job_id: str
    reason: EndReason  # CANCELLED, DEADLINE, or STOP where a door found a stop string
    branch: int | None = None  # only this one; the others go on


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What any gateway must know of an accepted request to tell its answer, or to end it. Its jobs are `request_id`,
    `<request_id>.1`, ..., one a prompt."""

    request_id: str
    tenant: str  # who may ask for it
    endpoint: str
    outline: bytes  # the JSON body, but for its prompts, in whose place the shortest possible stand
    digest: bytes  # SHA-256 of endpoint and whole body
    created_s: float  # queue time, Unix seconds
    deadline_s: float  # queue time, Unix seconds
    num_prompt_tokens: bytes  # uint32[num_jobs]
    prompt_texts: tuple[str, ...] = ()  # where the answer repeats them
    first_ids: bytes = b""  # uint32[num_jobs], the prompts' first tokens, where it tells how likely the others were
    stays: bool = False  # it outlives its client: for a while, or in the background to its end


@dataclass(frozen=True, kw_only=True)
class WorkerCard:
    """What a worker says of itself with each heartbeat; lives in Redis for a few heartbeats."""

    worker_id: str
    model: str
    ready: bool  # true after a real generation, false while draining
    max_model_len: int
    num_blocks: int
    block_size: int
    beat_at_s: float  # queue time, set by the queue
    blocks: bytes = b""  # the pool as a picture (service/engine/kv/block_pool.py), while somebody looks
    host_blocks: bytes = b""  # the second tier likewise
    stats: dict[str, float] = field(
        default_factory=dict
    )  # gauges and counters, named as in observability/worker_metrics.py


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A job that was ended because engines died of it, kept for whoever wants to see why."""

    job_id: str
    job: bytes  # the Job, as it was accepted
    deaths: int  # engine deaths while it was in flight; at the last it ran alone
    cause: str  # of the last death
    buried_at_s: float  # queue time, Unix seconds


@dataclass(frozen=True, kw_only=True)
class IngressJob:
    """What a foreign producer writes to its ingress stream: an OpenAI request body and where it belongs. The body
    holds what JSON can hold; only a `prompt` of token ids may come packed (bin, uint32): a list once decoded."""

    v: int
    id: str  # the producer's own name for the job, [A-Za-z0-9_.-]{1,64}
    endpoint: str  # "/v1/completions" | "/v1/chat/completions"
    body: dict[str, Any]
    traceparent: str | None = None  # W3C's; one that is not well formed counts as none


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a foreign producer reads from its reply stream: some more text, or the end with `done`."""

    id: str  # the producer's own name for the job
    number: int  # 1, 2, 3, ... within the job
    index: int = 0  # which choice the text belongs to, below n
    text: str = ""
    finish_reason: str | None = None  # OpenAI's word, in the last reply of its choice
    tool_calls: list[dict[str, Any]] | None = None  # OpenAI's objects, in the last reply of a choice that calls
    usage: Usage | None = None  # with `done`, where the job succeeded
    error: dict[str, Any] | None = None  # OpenAI's error object, with `done`, where it did not
    done: bool = False  # nothing follows
