"""Types of OpenAI's and vLLM's request bodies. Errors name a field, never its value.

A field is supported, idle (accepted only with values that change nothing: the IDLE tables), or unknown and refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from service import typed_decoding
from service.errors import RequestError
from service.gateway.core.refusals import missing, refusal

MAX_LOGPROBS = 20
MAX_CHOICES = 128  # OpenAI's; `--max-n` lowers it
MAX_BEAM_WIDTH = 16
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's

Body = TypeVar("Body", bound=msgspec.Struct)

RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
    "max_output_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "timeout": (0.001, 86400),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "beam_width": (1, MAX_BEAM_WIDTH),
    "length_penalty": (-10, 10),
    "truncate_prompt_tokens": (-1, 1 << 31),
    "max_tool_calls": (1, 1 << 31),
    "thinking_token_budget": (0, 1 << 31),
    "priority": (-100, 100),
}
"""Closed ranges. The reader checks numbers that have none."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """vLLM's, without `structural_tag`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # no effect: no fallback exists
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    allowed_token_ids: list[int] = []
    bad_words: list[str] = []
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    timeout: float | None = None
    priority: int = 0
    resumable: bool = False
    background: bool = False
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    session_id: str = ""
    request_id: str = ""
    cache_salt: str = ""


class CompletionBody(GenerationBody, frozen=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    parse_special: bool = False


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: str = "float"
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    priority: int = 0
    user: str = ""


class PoolingBody(EmbeddingBody, frozen=True):
    add_special_tokens: bool = True


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    id: str
    type: str = "function"
    function: CalledFunction
    index: int | None = None  # echoed by streaming clients


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # former name
    provider_specific_fields: dict[str, Any] = {}  # echoed by litellm, which repeats the reasoning there


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    function: FunctionTool
    defer_loading: bool = False  # no effect: the model gets every function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    function: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    mode: str
    tools: list[ChosenFunction]


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatBody(GenerationBody, frozen=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Tool] = []
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool = False
    metadata: dict[str, str] = {}
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    verbosity: str | None = None


Idle = Mapping[str, tuple[Any, ...]]

CACHE_RETENTIONS = ("in_memory", "in-memory", "24h")

_BOTH: Idle = {
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False, True),  # for /render, which is not served
    "stream_interval": (1,),
    "truncation_side": ("left",),
    "watermarking": (False,),
}

IDLE_COMPLETION_FIELDS: Idle = {
    **_BOTH,
    "suffix": ("",),
    "prompt_embeds": (),
}

IDLE_CHAT_FIELDS: Idle = {
    **_BOTH,
    "functions": ([],),
    "function_call": ("none",),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": CACHE_RETENTIONS,
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

IDLE_RESPONSE_FIELDS: Idle = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": CACHE_RETENTIONS,
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}

IDLE_EMBEDDING_FIELDS: Idle = {"dimensions": ()}

IDLE_POOLING_FIELDS: Idle = {
    **IDLE_EMBEDDING_FIELDS,
    "task": ("embed",),
    "messages": (),
    "use_activation": (),
    "padding": (),
    "truncation_side": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}

IDLE_ITEM_FIELDS: Idle = {
    "phase": (),
    "caller": (),
    "async": (False,),
}

IDLE_MESSAGE_FIELDS: Idle = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


def check_ranges(body: msgspec.Struct) -> None:
    """Raises RequestError (400) for a number outside RANGES; NaN is in no range."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name in RANGES and value is not None:
            low, high = RANGES[name]
            if not low <= value <= high:
                raise refusal(name, f"must be between {low} and {high}")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises RequestError (400) for too many or too long entries."""
    if len(metadata) > MAX_METADATA:
        raise refusal("metadata", f"has more than {MAX_METADATA} entries")
    if any(len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS for key, value in metadata.items()):
        raise refusal("metadata", f"has a key above {MAX_KEY_CHARS} or a value above {MAX_VALUE_CHARS} characters")


def convert(fields: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert `fields` to a `kind`, with strict types; null fields count as absent. Raises RequestError (400)."""
    fields = present(fields, kind)
    for name in fields:
        if name not in kind.__struct_encode_fields__:
            raise unknown_field(name)
    try:
        return typed_decoding.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _refusal_of(str(error)) from None


def check_part_types(parts: Any, kinds: Collection[str], param: str) -> None:
    """Refuse content parts or tools of other types, before their fields are checked. Raises RequestError (400)."""
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] not in kinds:
            raise refusal(f"{param}[{i}].type", f"must be {' or '.join(sorted(kinds))}")


def present(value: Any, kind: type[msgspec.Struct]) -> Any:
    """Drop null fields, except in a client's own objects (schemas, call arguments)."""
    if isinstance(value, list):
        return [present(item, kind) for item in value]
    if not isinstance(value, Mapping):
        return value
    inner = _inner_kinds(kind)
    return {
        name: present(item, inner[name]) if name in inner else item for name, item in value.items() if item is not None
    }


@cache
def _inner_kinds(kind: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct]]:
    found = {field.encode_name: _struct_in(field.type) for field in typed_decoding.fields_of(kind)}
    return {name: inner for name, inner in found.items() if inner is not None}


def _struct_in(of: inspect.Type) -> type[msgspec.Struct] | None:
    if isinstance(of, inspect.StructType):
        return of.cls
    if isinstance(of, inspect.ListType):
        return _struct_in(of.item_type)
    choices = map(_struct_in, of.types if isinstance(of, inspect.UnionType) else ())
    return next((inner for inner in choices if inner is not None), None)


def unknown_field(name: Any) -> RequestError:
    """Return the 400 for an unknown field."""
    param = _showable(name)
    return RequestError(400, f"Unknown field '{param}'.", param=param, code="unknown_field")


def _refusal_of(complaint: str) -> RequestError:
    """Reword msgspec's message, which may quote an unknown field."""
    what, _, place = complaint.rpartition(" - at `$") if " - at `$" in complaint else (complaint, "", "")
    place = place.rstrip("`").lstrip(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return unknown_field(f"{place}.{unknown[1]}")
    if absent := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return missing(f"{place}.{absent[1]}".lstrip("."))
    param = _showable(place)
    return RequestError(400, f"'{param}' has the wrong type: {what.replace('`', '').lower()}.", param=param)


def _showable(name: Any) -> str:
    """Return a client's field name, made safe for responses and logs."""
    text = name if isinstance(name, str) else "?"
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:64])


def without_idle_fields(fields: Mapping[str, Any], idle: Idle, prefix: str = "") -> dict[str, Any]:
    """Return `fields` without null and idle ones.

    Raises RequestError (400) for an idle field with another value; `prefix` precedes its name.
    """
    left = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in idle:
            left[name] = value
            continue
        asked = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
        if not any(type(asked) is type(accepted) and asked == accepted for accepted in idle[name]):
            param = prefix + name
            hint = " with any but its default value" if idle[name] else ""
            raise RequestError(400, f"'{param}' is not supported here{hint}.", param=param)
    return left
