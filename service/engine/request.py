from __future__ import annotations

from dataclasses import dataclass

from model.sampling_params import SamplingParams
from service.errors import EndReason


@dataclass(frozen=True, kw_only=True)
class BranchHistory:
    """Tokens emitted by an earlier engine."""

    token_ids: tuple[int, ...] = ()
    end: EndReason | None = None
    sum_logprob: float = 0.0  # if branches are ranked


@dataclass(slots=True)
class RequestTimes:
    """Unix seconds; 0 until reached."""

    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """LoRA adapter: its folder, and the expected digest of its contents."""

    name: str
    path: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""
    cache_salt: str = ""  # blocks are shared within a salt
    num_scored_tokens: int = 0  # log-probabilities emitted
    history: tuple[BranchHistory, ...] = ()
    times: RequestTimes | None = None
    adapter: AdapterSource | None = None  # None: the base model
