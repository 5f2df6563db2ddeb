"""What a request asks of sampling and of its own end, in token terms; stop strings and other text stay upstairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_LOGPROBS = 20
"""Alternatives a request may ask for at each token."""


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Keep the `width` likeliest continuations; the words are Hugging Face's and vLLM's."""

    width: int  # 1..16
    length_penalty: float = 1.0  # -10..10; a beam's score is its log-probability over its length to this power
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Validated where requests enter; everything below trusts the ranges given here."""

    max_tokens: int  # 1.. ; the door has already bounded it by max_model_len - prompt
    min_tokens: int = 0  # 0..max_tokens; EOS and stop ids are forbidden before
    temperature: float = 1.0  # 0..; 0 = greedy
    top_k: int | None = None  # 1..
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # (0, 10]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    seed: int = 0  # 0..2^64-1; the door draws one where the client gave none
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: not wanted; K: the chosen token's and K alternatives'
    prompt_logprobs: int | None = None  # the same of each token of the prompt but the first
    pooling: Literal["mean", "last"] | None = None  # the prompt's hidden states as one vector, told with the end
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added)
    grammar: str | None = None  # what the answer must look like, as model.text.grammar writes it
    n: int = 1  # answers wanted
    best_of: int = 1  # n.. ; branches sampled; the n of the highest mean log-probability a token are the answers
    beam: BeamSearch | None = None  # instead of sampling; n..width answers; best_of is 1 then

    @property
    def num_branches(self) -> int:
        """Sequences that the request runs at once."""
        return self.beam.width if self.beam is not None else max(self.n, self.best_of)

    @property
    def ranks_branches(self) -> bool:
        """More are sampled than answered with, so that every chosen token's log-probability is needed."""
        return self.beam is None and self.best_of > self.n

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before weighs on the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
