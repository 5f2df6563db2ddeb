"""What the engine is asked to do, in token terms."""

from __future__ import annotations

from dataclasses import dataclass

from model.sampling_params import SamplingParams
from service.errors import EndReason


@dataclass(frozen=True, kw_only=True)
class BranchHistory:
    """What another engine has already told of a branch: this one goes on behind it."""

    token_ids: tuple[int, ...] = ()
    end: EndReason | None = None
    sum_logprob: float = 0.0  # of the tokens, where the request ranks its branches


@dataclass(slots=True)
class RequestTimes:
    """When a request got how far, in Unix seconds, for whoever asked to know; 0 is not yet. The engine writes it."""

    started_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What the engine is asked to do, in token terms."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""  # whose it is: tenants share the engine alike
    cache_salt: str = ""  # prompts share blocks only with prompts of the same salt
    num_scored_tokens: int = 0  # of the prompt, whose log-probabilities were told before this engine
    history: tuple[BranchHistory, ...] = ()  # by branch, what was told before this engine; empty: nothing
    times: RequestTimes | None = None
