"""What the engine is asked to do, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from model.sampling_params import SamplingParams
from service.errors import EndReason


@dataclass(frozen=True, kw_only=True)
class BranchHistory:
    """Tokens of a branch that were emitted before this engine got the request; generation continues after them."""

    token_ids: tuple[int, ...] = ()
    end: EndReason | None = None
    sum_logprob: float = 0.0  # of the tokens, if the request ranks its branches


@dataclass(slots=True)
class RequestTimes:
    """Unix times of a request's milestones, in seconds, 0 until reached. The engine writes them."""

    started_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One request: prompt, sampling parameters, and what was emitted before."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""  # tenants share the engine fairly
    cache_salt: str = ""  # prompts share blocks within a salt only
    num_scored_tokens: int = 0  # prompt tokens whose log-probabilities were already emitted
    history: tuple[BranchHistory, ...] = ()  # by branch; empty: nothing was emitted
    times: RequestTimes | None = None
