"""Response schemas of `/v1/messages` for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from service.gateway.openapi.response_answers import Shape


class ThinkingBlock(Shape, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class TextBlock(Shape, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(Shape, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Shape):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicError(Shape):
    type: str
    message: str


class AnthropicRefusal(Shape):
    type: Literal["error"]
    error: AnthropicError
    request_id: str | None


class TokenCount(Shape):
    input_tokens: int
