"""Resolves sampling parameters against the model's defaults, context and token budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.gateway.core.refusals import too_costly, too_long
from service.gateway.core.request import GenerationRequest, RequestedSampling


class SamplingResolver:
    """Fills in the model's sampling defaults and limits a request's tokens."""

    def __init__(self, defaults: Mapping[str, float], settings: Settings) -> None:
        self._defaults = defaults
        self._settings = settings

    def by_prompt(
        self, request: GenerationRequest, seed: int, lengths: Sequence[int], max_model_len: int
    ) -> list[SamplingParams]:
        """Return one set of parameters per prompt. `lengths`: prompt tokens. Raises RequestError (400)."""
        params, param = request.sampling, "messages" if request.is_chat else "prompt"
        budget = self._settings.max_request_tokens
        fair_share = (budget - sum(lengths)) // (params.num_branches * len(lengths))
        resolved = []
        for length in lengths:
            room = max_model_len - length
            most = min(room, max(fair_share, 1))
            max_tokens = most if params.max_tokens is None else params.max_tokens
            if params.fits_context:
                max_tokens = min(max_tokens, most)
            least = max(max_tokens, params.min_tokens, 1)
            if least > room:
                raise too_long(max_model_len, param, (length, least))
            if params.min_tokens > max_tokens:
                raise too_costly(budget)
            resolved.append(self._resolve(params, seed, max_tokens))
        if sum(lengths) + params.num_branches * sum(one.max_tokens for one in resolved) > budget:
            raise too_costly(budget)
        return resolved

    def _resolve(self, params: RequestedSampling, seed: int, max_tokens: int) -> SamplingParams:
        distribution = self._distribution(params) if params.beam is None else {"temperature": 0.0, "top_k": None}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            **distribution,
            repetition_penalty=self._or_default(params.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
            n=params.n,
            best_of=params.best_of,
            pooling=_pooling(self._settings) if params.embeds else None,
            beam=params.beam,
        )

    def _distribution(self, params: RequestedSampling) -> dict[str, Any]:
        return {
            "temperature": self._or_default(params.temperature, "temperature", 1.0),
            "top_k": int(self._or_default(params.top_k, "top_k", 0)) or None,
            "top_p": self._or_default(params.top_p, "top_p", 1.0),
            "min_p": self._or_default(params.min_p, "min_p", 0.0),
        }

    def _or_default(self, value: float | None, name: str, neutral: float) -> float:
        return float(self._defaults.get(name, neutral) if value is None else value)


def _pooling(settings: Settings) -> Literal["mean", "last"]:
    return "mean" if settings.pooling == "mean" else "last"
