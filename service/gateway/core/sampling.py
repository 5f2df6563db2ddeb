"""What a request's wishes come to: the model's defaults where it is silent, and what it may cost at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.gateway.generation.refusals import too_costly, too_long
from service.gateway.generation.request import Request, SamplingWishes


class Samplings:
    def __init__(self, defaults: Mapping[str, float], settings: Settings) -> None:
        self._defaults = defaults
        self._settings = settings

    def by_prompt(self, request: Request, lengths: Sequence[int], max_model_len: int) -> list[SamplingParams]:
        """For prompts of these lengths, in tokens. Raises RequestError (400) where one is too long or all together cost
        too much."""
        wishes, param = request.sampling, "messages" if request.is_chat else "prompt"
        budget = self._settings.max_request_tokens
        fair_share = (budget - sum(lengths)) // (wishes.num_branches * len(lengths))
        samplings = []
        for length in lengths:
            room = max_model_len - length
            max_tokens = min(room, max(fair_share, 1)) if wishes.max_tokens is None else wishes.max_tokens
            if room < 1 or max_tokens > room or wishes.min_tokens > max_tokens:
                raise too_long(max_model_len, param)
            samplings.append(self._sampling(wishes, max_tokens))
        if sum(lengths) + wishes.num_branches * sum(sampling.max_tokens for sampling in samplings) > budget:
            raise too_costly(budget)
        return samplings

    def _sampling(self, wishes: SamplingWishes, max_tokens: int) -> SamplingParams:
        chance = self._chance(wishes) if wishes.beam is None else {"temperature": 0.0, "top_k": None}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=wishes.min_tokens,
            **chance,
            repetition_penalty=self._wished(wishes.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=wishes.presence_penalty,
            frequency_penalty=wishes.frequency_penalty,
            seed=wishes.seed,
            stop_token_ids=wishes.stop_token_ids,
            ignore_eos=wishes.ignore_eos,
            logprobs=wishes.logprobs,
            prompt_logprobs=wishes.prompt_logprobs,
            logit_bias=wishes.logit_bias,
            n=wishes.n,
            best_of=wishes.best_of,
            pooling=self._settings.pooling if wishes.embeds else None,
            beam=wishes.beam,
        )

    def _chance(self, wishes: SamplingWishes) -> dict[str, Any]:
        """What shapes the distribution that is sampled from."""
        return {
            "temperature": self._wished(wishes.temperature, "temperature", 1.0),
            "top_k": int(self._wished(wishes.top_k, "top_k", 0)) or None,
            "top_p": self._wished(wishes.top_p, "top_p", 1.0),
            "min_p": self._wished(wishes.min_p, "min_p", 0.0),
        }

    def _wished(self, wish: float | None, name: str, neutral: float) -> float:
        return float(self._defaults.get(name, neutral) if wish is None else wish)
