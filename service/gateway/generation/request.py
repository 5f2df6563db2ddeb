"""A request as both doors understand it: validated, in the house's own terms, JSON left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.sampling_params import BeamSearch
from model.text.grammar_task import GrammarSpec
from model.text.tool_calls.reader import Function

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
"""Another body and answer of EMBEDDINGS, which is the endpoint of its requests."""
ENDPOINTS = (COMPLETIONS, CHAT)
"""Those that the queue door knows too."""
BATCH_ENDPOINTS = (*ENDPOINTS, RESPONSES, EMBEDDINGS)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template renders. Every message is a map of `role`, `content` and perhaps `name`, all text, and of
    `tool_calls`, whose arguments are JSON values."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's objects, which templates know
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on inside the last message; no generation prompt then
    template_options: Mapping[str, bool] = field(default_factory=dict)  # from a short list of known names


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True)
class RequestedGrammar:
    """What the answer must look like."""

    spec: GrammarSpec  # not yet checked
    param: str  # the field that asks for it


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """Functions that an answer may call, or must."""

    tools: tuple[dict[str, Any], ...]  # all that the model hears of, for its template
    callable: tuple[Function, ...]
    must_call: bool = False
    is_named: bool = False  # the client chose the function
    only_one: bool = False  # call


@dataclass(frozen=True, kw_only=True)
class RequestedSampling:
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
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: RequestedGrammar | None = None
    n: int = 1  # choices of each prompt
    best_of: int = 1  # n.. ; branches sampled for each prompt
    beam: BeamSearch | None = None  # instead of sampling
    embeds: bool = False  # the prompt's vector is wanted, and no text

    @property
    def num_branches(self) -> int:
        """Continuations of a prompt that run side by side."""
        return self.beam.width if self.beam is not None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Which branches are answered with is known at the end only."""
        return self.beam is not None or self.best_of > self.n


@dataclass(frozen=True)
class Source:
    """The body that a request was read from, for whoever has to read it again."""

    outline: bytes  # JSON; the shortest possible prompts stand in place of its own
    digest: bytes  # SHA-256 of endpoint and whole body


NO_SOURCE = Source(b"", b"")


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One or several generations. Token ids are not yet held against the vocabulary, nor lengths against the model."""

    endpoint: str  # one of BATCH_ENDPOINTS
    model: str | None  # None: the one that is served
    prompts: tuple[Prompt, ...]  # one at least; exactly one in a chat
    sampling: RequestedSampling
    tools: ToolSpec | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True  # to a prompt that is text; a conversation has what its template says
    truncate_prompt_tokens: int | None = None  # keep so many, the last; -1: as many as fit
    echo: bool = False
    only_echoes: bool = False  # what is generated is not told
    tokens_as_ids: bool = False  # in log-probabilities
    has_prompt_logprobs_field: bool = False  # in a field of their own
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    timeout_s: float | None = None
    priority: int = 0  # among its tenant's own requests; lower goes first
    is_batch: bool = False  # it waits until nothing else does
    resumable: bool = False  # goes on for a while when its client leaves
    background: bool = False  # goes on without a client
    source: Source = NO_SOURCE

    @property
    def stays(self) -> bool:
        """Whether it outlives its client."""
        return self.resumable or self.background

    @property
    def is_chat(self) -> bool:
        """Whether its one prompt is a conversation."""
        return self.endpoint in (CHAT, RESPONSES)

    @property
    def begins_a_text(self) -> bool:
        """Whether the answer is a text of its own, and not the rest of another."""
        prompt = self.prompts[0]
        return isinstance(prompt, Conversation) and not prompt.continue_final_message

    @property
    def hides_special_tokens(self) -> bool:
        """Whether special tokens are dropped from the text at once; calls may begin with one, which is told later."""
        return self.skip_special_tokens and self.tools is None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n
