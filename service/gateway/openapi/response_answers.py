"""Response schemas of `/v1/responses` for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields without a default are always present."""


class ResponseLikelihood(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ResponseTokenLogprob(ResponseLikelihood):
    top_logprobs: list[ResponseLikelihood]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ResponseTokenLogprob]


class OutputMessage(Shape, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class FunctionCall(Shape, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class ReasoningOutputPart(Shape):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningOutput(Shape, tag_field="type", tag="reasoning"):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[ReasoningOutputPart]
    content: list[ReasoningOutputPart] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class InputTokensDetails(Shape):
    cached_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Shape):
    code: str
    message: str


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ReasoningOutput | OutputMessage | FunctionCall]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class InputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(Shape):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(Shape):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
