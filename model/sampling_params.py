"""A request's sampling and end conditions, in tokens; text, such as stop strings, stays in the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_LOGPROBS = 20
"""Most alternatives returned per token."""


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Keep the `width` likeliest continuations; names as in Hugging Face and vLLM."""

    width: int  # 1..16
    length_penalty: float = 1.0  # -10..10; a beam's score is log-probability / length ** length_penalty
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Validated where requests enter; other code trusts these ranges."""

    max_tokens: int  # 1..; admission bounds it by max_model_len - prompt
    min_tokens: int = 0  # 0..max_tokens; no EOS or stop id before
    temperature: float = 1.0  # 0..; 0 = greedy
    top_k: int | None = None  # 1..
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # (0, 10]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    seed: int = 0  # 0..2^64-1; drawn at admission if not given
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # K: the sampled token's and K alternatives'
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    pooling: Literal["mean", "last"] | None = None  # return the prompt's hidden states as one vector, at the end
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added)
    grammar: str | None = None  # a text of model.text.grammar
    n: int = 1  # number of answers
    best_of: int = 1  # n..; sampled branches; the n with the highest mean log-probability are returned
    beam: BeamSearch | None = None  # instead of sampling; n..width answers, with best_of 1

    @property
    def num_branches(self) -> int:
        """Sequences that the request runs at once."""
        return self.beam.width if self.beam is not None else max(self.n, self.best_of)

    @property
    def ranks_branches(self) -> bool:
        """Whether more are sampled than returned, which needs every sampled token's log-probability."""
        return self.beam is None and self.best_of > self.n

    @property
    def has_penalties(self) -> bool:
        """Whether previous tokens affect the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
