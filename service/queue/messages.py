"""Messages in Redis: frozen, versioned msgpack maps; README.md explains their fields. Token ids are packed
little-endian uint32; times are queue time, Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from model.sampling_params import SamplingParams
from service.errors import EndReason

VERSION = 1
MAX_PARTS = 33
"""Prompt and 32 branches (limit of `--max-n`)."""


@dataclass(frozen=True, kw_only=True)
class JobAdapter:
    """LoRA adapter: its folder, read by workers, and the expected digest of its contents."""

    name: str
    path: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Job:
    job_id: str  # 26 characters of Crockford base 32
    tenant: str
    prompt: bytes  # uint32[num_prompt_tokens]
    sampling: SamplingParams
    submitted_at_s: float
    deadline_s: float | None = None
    feed: str
    priority: int = 0  # lower first
    is_batch: bool = False
    traceparent: str | None = None
    model: str | None = None
    cache_salt: str = ""  # prefixes are shared only within tenant and salt
    adapter: JobAdapter | None = None  # None: the base model


class TokenLogprobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Log-probabilities of n tokens, K alternatives each."""

    chosen: bytes  # float32[n]
    top_ids: bytes  # uint32[n * K]
    top: bytes  # float32[n * K]


class Usage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET  # drafts; unset if none were verified
    rejected_prediction_tokens: int | UnsetType = UNSET


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    branch: int = 0
    tokens: bytes = b""  # uint32[n]
    logprobs: TokenLogprobs | None = None
    end: EndReason | None = None
    is_prompt: bool | None = None  # prompt tokens, from the second on


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
    end: EndReason | None = None  # in the last event
    usage: Usage | None = None  # in the first event and with `end`
    choices: Annotated[tuple[int, ...], Meta(max_length=MAX_PARTS)] = ()
    embedding: bytes | None = None  # float32[hidden]


@dataclass(frozen=True, kw_only=True)
class Cancel:
    job_id: str
    reason: EndReason
    branch: int | None = None  # None: the job


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    request_id: str
    tenant: str
    endpoint: str
    outline: bytes
    digest: bytes  # SHA-256
    created_s: float
    deadline_s: float
    num_prompt_tokens: bytes  # uint32[num_jobs]
    prompt_texts: tuple[str, ...] = ()
    first_ids: bytes = b""  # uint32[num_jobs]
    prompt_ids: bytes = b""  # uint32[sum of num_prompt_tokens]
    stays: bool = False
    reasoning: str = ""  # ReasoningState that the prompt leaves to the answer
    client_id: str | None = None  # the client's name for the request


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Blocks of a sequence, first tokens first. `blocks`, `holders` and `states` may be truncated to the same
    length."""

    request_id: str
    branch: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    blocks: bytes = b""  # uint32: ids on the GPU
    holders: bytes = b""  # uint32: sequences and transfers that hold each block
    states: bytes = b""  # service/engine/kv/table_view.py
    copies: bytes = b""  # uint32 pairs: index of a block copied on write, id of its source
    host_blocks: bytes = b""  # uint32: ids of a preempted sequence's blocks on the host
    num_drafted: int = 0  # in the last step
    num_accepted: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerCard:
    worker_id: str
    model: str
    ready: bool
    max_model_len: int
    num_blocks: int
    block_size: int
    beat_at_s: float  # set by the queue
    blocks: bytes = b""  # service/engine/kv/block_pool.py
    host_blocks: bytes = b""
    stats: dict[str, float] = field(default_factory=dict)  # observability/worker_metrics.py
    weight_format: str = ""  # "bfloat16", "compressed-tensors float-quantized"
    weight_bytes: int = 0
    kv_cache_dtype: str = ""  # "bfloat16", "fp8_e4m3"
    block_bytes: int = 0
    tables: tuple[BlockTable, ...] = ()  # while a page is open
    max_loras: int = 0  # 0: adapters are off
    running_adapters: str = ""  # names, comma-separated
    waiting_adapters: str = ""


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    job_id: str
    job: bytes
    deaths: int
    cause: str
    buried_at_s: float


@dataclass(frozen=True, kw_only=True)
class IngressJob:
    v: int
    id: str  # [A-Za-z0-9_.-]{1,64}
    endpoint: str  # "/v1/completions" | "/v1/chat/completions"
    body: dict[str, Any]
    traceparent: str | None = None  # ignored if malformed


@dataclass(frozen=True, kw_only=True)
class Reply:
    id: str
    number: int  # 1, 2, 3, ... within the job
    index: int = 0  # choice, below n
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    done: bool = False
