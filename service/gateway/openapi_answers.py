"""The shapes of our answers, for `/openapi.json`; the tests hold real answers against them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every field that has no default is always there."""


class PromptTokensDetails(Shape):
    cached_tokens: int


class TokenUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    tokens: list[int]
    token_strs: list[str] | None
    max_model_len: int


class Detokenized(Shape):
    prompt: str


class Status(Shape):
    status: str


class Readiness(Shape):
    status: Literal["ok", "not ready"]
    missing: list[str]
    num_ready_workers: int


class ErrorObject(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(Shape):
    error: ErrorObject


ANSWERS: tuple[Any, ...] = (Completion, ChatCompletion, ModelList, Tokens, Detokenized, Status, Readiness, Refusal)
