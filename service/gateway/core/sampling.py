"""What a request's wishes come to: the model's defaults where it is silent, and what it may cost at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.gateway.generation.refusals import too_costly, too_long
from service.gateway.generation.request import GenerationRequest, RequestedSampling


class SamplingResolver:
    def __init__(self, defaults: Mapping[str, float], settings: Settings) -> None:
        self._defaults = defaults
        self._settings = settings

    def by_prompt(self, request: GenerationRequest, lengths: Sequence[int], max_model_len: int) -> list[SamplingParams]:
        """For prompts of these lengths, in tokens. Raises RequestError (400) where one is too long or all together cost
        too much."""
        params, param = request.sampling, "messages" if request.is_chat else "prompt"
        budget = self._settings.max_request_tokens
        fair_share = (budget - sum(lengths)) // (params.num_branches * len(lengths))
        sampling_params = []
        for length in lengths:
            room = max_model_len - length
            max_tokens = min(room, max(fair_share, 1)) if params.max_tokens is None else params.max_tokens
            if room < 1 or max_tokens > room or params.min_tokens > max_tokens:
                raise too_long(max_model_len, param)
            sampling_params.append(self._sampling(params, max_tokens))
        if sum(lengths) + params.num_branches * sum(sampling.max_tokens for sampling in sampling_params) > budget:
            raise too_costly(budget)
        return sampling_params

    def _sampling(self, params: RequestedSampling, max_tokens: int) -> SamplingParams:
        distribution = self._distribution(params) if params.beam is None else {"temperature": 0.0, "top_k": None}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            **distribution,
            repetition_penalty=self._or_default(params.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
            n=params.n,
            best_of=params.best_of,
            pooling=self._settings.pooling if params.embeds else None,
            beam=params.beam,
        )

    def _distribution(self, params: RequestedSampling) -> dict[str, Any]:
        """What shapes the distribution that is sampled from."""
        return {
            "temperature": self._or_default(params.temperature, "temperature", 1.0),
            "top_k": int(self._or_default(params.top_k, "top_k", 0)) or None,
            "top_p": self._or_default(params.top_p, "top_p", 1.0),
            "min_p": self._or_default(params.min_p, "min_p", 0.0),
        }

    def _or_default(self, value: float | None, name: str, neutral: float) -> float:
        return float(self._defaults.get(name, neutral) if value is None else value)
