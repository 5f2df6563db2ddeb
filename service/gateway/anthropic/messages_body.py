"""Types of the body of Anthropic's `/v1/messages`. A null counts as absent."""

from __future__ import annotations

from typing import Any

import msgspec

from service.gateway.openai.request_bodies import Idle


class Content(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of content parts."""

    type: str
    cache_control: dict[str, Any] | None = None  # no effect: every prefix is cached


class TextContent(Content, frozen=True):
    text: str
    citations: list[Any] = []  # echoed from a response; not shown to the model


class ThinkingContent(Content, frozen=True):
    thinking: str
    signature: str = ""


class RedactedThinkingContent(Content, frozen=True):
    data: str  # encrypted by Anthropic; not shown to the model


class ToolUseContent(Content, frozen=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultContent(Content, frozen=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""  # text parts
    is_error: bool = False  # not shown to the model; the content is


PARTS: dict[str, type[Content]] = {
    "text": TextContent,
    "thinking": ThinkingContent,
    "redacted_thinking": RedactedThinkingContent,
    "tool_use": ToolUseContent,
    "tool_result": ToolResultContent,
}
PARTS_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class Turn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    role: str
    content: str | list[dict[str, Any]]


class ClientTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str
    input_schema: dict[str, Any]
    type: str = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments always stream as they are generated
    input_examples: list[Any] = []
    defer_loading: bool = False
    allowed_callers: list[str] = []


class ToolSelection(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    user_id: str | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields that decide a prompt."""

    model: str | None = None
    messages: list[Turn]
    system: str | list[dict[str, Any]] = ""  # or text parts
    tools: list[dict[str, Any]] = []  # each a ClientTool
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # its former place
    cache_control: dict[str, Any] | None = None


class Diagnostics(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    previous_message_id: str | None = None


class MessagesBody(CountBody, frozen=True):
    max_tokens: int
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: RequestMetadata = RequestMetadata()
    diagnostics: Diagnostics = Diagnostics()  # for Anthropic's cache
    user_profile_id: str = ""


NO_THREADS = "thread_unsupported_request"
"""Anthropic's error code after which its client sends whole conversations."""

KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Claude Code's `context_management`, which has no effect."""

IDLE_COUNT_FIELDS: Idle = {
    "container": (),
    "context_management": ({}, {"edits": []}, KEPT_THINKING),
    "mcp_servers": ([],),
}
IDLE_MESSAGES_FIELDS: Idle = {
    **IDLE_COUNT_FIELDS,
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "compaction": (),
    "fallback_credit_token": (),
    "fallbacks": ([], "default"),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}
