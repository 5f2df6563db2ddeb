"""Types of the body of `/v1/responses`."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from service.gateway.openai.responses.reasoning_items import ReasoningConfig

SEPARATOR = "__"
MAX_NAME_CHARS = 64
HASH_CHARS = 12


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    text: str
    annotations: list[Any] = []  # echoed from a response; neither stored nor shown to the model
    logprobs: list[Any] = []


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str = "message"
    role: str
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class CallOutputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | None = None  # groups an MCP server's functions
    defer_loading: bool = False  # no effect: the model gets every function

    @property
    def full_name(self) -> str:
        return full_name(self.namespace, self.name)


def full_name(namespace: str | None, name: str) -> str:
    """Return the name shown to the model, at most 64 characters if `name` is.

    A long name is cut off and ends with a hash.
    """
    if not namespace:
        return name
    joined = f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"
    if len(joined) <= MAX_NAME_CHARS:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:HASH_CHARS]
    return f"{joined[: MAX_NAME_CHARS - HASH_CHARS - 1]}_{digest}"


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[NamedTool] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    include: list[str] = []
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    tools: list[ResponseTool] = []
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool = False
    store: bool = True
    background: bool = False
    metadata: dict[str, str] = {}
    timeout: float | None = None
    priority: int = 0
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    cache_salt: str = ""
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    client_metadata: dict[str, str] = {}
    max_tool_calls: int | None = None  # limits hosted tools, which are never called
