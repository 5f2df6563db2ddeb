"""A request as both doors understand it: validated, in the house's own terms, JSON left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template renders. Every message is a map of `role`, `content` and perhaps `name`, all text."""

    messages: tuple[dict[str, str], ...]
    add_generation_prompt: bool = True
    template_options: Mapping[str, bool] = field(default_factory=dict)  # from a short list of known names


@dataclass(frozen=True, kw_only=True)
class SamplingWishes:
    """What the client said of sampling, ranges checked; None where it was silent and a default may speak."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None  # 0: no limit
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # 0..2^64-1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: not wanted; K: the chosen token's and K alternatives'
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. Token ids are not yet held against the vocabulary, nor lengths against the model."""

    model: str
    prompt: str | tuple[int, ...] | Conversation
    sampling: SamplingWishes
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    timeout_s: float | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Conversation)
