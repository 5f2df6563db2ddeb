"""Sampling and end conditions of a request, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_LOGPROBS = 20  # alternatives per token


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Beam search parameters, named as in Hugging Face and vLLM."""

    width: int  # 1..16
    length_penalty: float = 1.0  # -10..10; a beam's score is log-probability / length ** length_penalty
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, kw_only=True)
class ReasoningBudget:
    """Bound on the tokens between two markers at the beginning of an answer."""

    max_tokens: int  # 0..
    start: str
    end: str
    end_ids: tuple[int, ...]  # of `end`, forced after the last allowed token
    is_open: bool  # the answer begins after `start`


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids, none empty, contained in no answer
    reasoning: ReasoningBudget | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, validated at admission; other code trusts these ranges."""

    max_tokens: int  # 1..max_model_len - prompt
    min_tokens: int = 0  # 0..max_tokens; no EOS or stop id before
    temperature: float = 1.0  # 0..; 0 = greedy
    top_k: int | None = None  # 1..
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # (0, 10]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    seed: int = 0  # 0..2^64-1; random if not given
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # K alternatives, plus the sampled token
    prompt_logprobs: int | None = None  # the same for prompt tokens except the first
    pooling: Literal["mean", "last"] | None = None  # return one vector of the prompt's hidden states
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added)
    grammar: str | None = None  # a text of model.text.grammar
    rules: TokenRules | None = None
    n: int = 1  # answers
    best_of: int = 1  # n..; the n branches with the highest mean log-probability are returned
    beam: BeamSearch | None = None  # n..width answers, with best_of 1

    @property
    def num_branches(self) -> int:
        """Sequences run at once."""
        return self.beam.width if self.beam is not None else max(self.n, self.best_of)

    @property
    def ranks_branches(self) -> bool:
        """True if every token's log-probability is needed."""
        return self.beam is None and self.best_of > self.n

    @property
    def is_masked(self) -> bool:
        """True if the next token's mask depends on previous tokens."""
        return self.grammar is not None or self.rules is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
