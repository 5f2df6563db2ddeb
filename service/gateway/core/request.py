"""A validated generation request, independent of any API's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.sampling_params import BeamSearch
from model.text.grammar_task import GrammarSpec
from model.text.tool_calls.reader import Function

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
"""vLLM's request and response format for embeddings."""
ENDPOINTS = (COMPLETIONS, CHAT)
"""Endpoints that queue producers may name."""
BATCH_ENDPOINTS = (*ENDPOINTS, RESPONSES, EMBEDDINGS)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    messages: tuple[dict[str, Any], ...]  # role, content, name: text; tool_calls: with parsed arguments
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's objects, as templates expect
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # extends the last message, without a generation prompt
    template_options: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    hints: Mapping[str, str] = field(
        default_factory=dict
    )  # `reasoning_effort`, `verbosity`: set if the template uses them


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True)
class RequestedGrammar:
    spec: GrammarSpec  # not yet compiled
    param: str  # the request field with the grammar


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    tools: tuple[dict[str, Any], ...]  # for the chat template
    callable: tuple[Function, ...]
    must_call: bool = False
    is_named: bool = False  # the client chose the function
    only_one: bool = False  # at most one call


@dataclass(frozen=True, kw_only=True)
class RequestedSampling:
    """Sampling parameters in checked ranges. None: the model's default."""

    max_tokens: int | None = None
    fits_context: bool = False  # lower max_tokens to fit the context
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
    logprobs: int | None = None  # K: log-probabilities of the sampled token and the top K; None: off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: RequestedGrammar | None = None
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()
    reasoning_budget: int | None = None  # tokens
    n: int = 1  # choices per prompt
    best_of: int = 1  # branches sampled per prompt, >= n
    beam: BeamSearch | None = None  # replaces sampling
    embeds: bool = False  # return the prompt's vector, no text

    @property
    def num_branches(self) -> int:
        return self.beam.width if self.beam is not None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """True if the returned branches are chosen only at the end."""
        return self.beam is not None or self.best_of > self.n


@dataclass(frozen=True)
class Source:
    """A request's body, kept to parse it again."""

    outline: bytes  # the body's JSON with minimum-length prompts
    digest: bytes  # SHA-256 of the endpoint and the whole body


NO_SOURCE = Source(b"", b"")


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A generation request. Token ids and lengths are not yet checked against the model."""

    endpoint: str  # one of BATCH_ENDPOINTS, or MESSAGES
    model: str | None  # None: the served model
    prompts: tuple[Prompt, ...]  # at least one; exactly one in a chat
    sampling: RequestedSampling
    tools: ToolSpec | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True  # for text prompts
    parse_special: bool = False  # for text prompts
    truncate_prompt_tokens: int | None = None  # keep the last N; -1: as many as fit
    echo: bool = False
    only_echoes: bool = False  # drop generated text
    tokens_as_ids: bool = False  # in log-probabilities
    include_reasoning: bool = True  # in the response
    has_prompt_logprobs_field: bool = False  # vLLM's field, not OpenAI's echo
    has_token_ids: bool = False  # of prompt and output, in the response
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    timeout_s: float | None = None
    client_id: str = ""  # the client's id for it
    cache_salt: str = ""  # prefix sharing only within a salt
    priority: int = 0  # within the tenant; lower runs first
    is_batch: bool = False  # runs only if no other request waits
    resumable: bool = False  # survives without a client for `resume_grace` seconds
    background: bool = False  # needs no client
    source: Source = NO_SOURCE

    @property
    def outlives_client(self) -> bool:
        return self.resumable or self.background

    @property
    def is_chat(self) -> bool:
        return self.endpoint in (CHAT, RESPONSES, MESSAGES)

    @property
    def begins_a_text(self) -> bool:
        """False if the response continues a text."""
        prompt = self.prompts[0]
        return isinstance(prompt, Conversation) and not prompt.continue_final_message

    @property
    def hides_special_tokens(self) -> bool:
        """False with tools: a special token may open a tool call."""
        return self.skip_special_tokens and self.tools is None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n


OutlineReader = Callable[[str, bytes], GenerationRequest]
"""Parses (endpoint, Source.outline) into the request, with minimum-length prompts."""
