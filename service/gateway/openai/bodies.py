"""The types of OpenAI's request bodies, and how a body that does not fit them is refused: by name, never by value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from service.errors import RequestError
from service.gateway.generation.refusals import missing, refusal

MAX_LOGPROBS = 20
MAX_CHOICES = 128  # OpenAI's own; `--max-n` bounds it further
MAX_BEAM_WIDTH = 16
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's own

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
    "priority": (-100, 100),
}
"""Closed ranges; every number of a body stands here or is checked where it is used."""


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
    """vLLM's. What stands here is what can be had; its `structural_tag` cannot."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
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
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    timeout: float | None = None
    priority: int = 0
    resumable: bool = False
    background: bool = False
    user: str = ""
    safety_identifier: str = ""


class CompletionBody(GenerationBody):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: str = "float"
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    priority: int = 0
    user: str = ""


class PoolingBody(EmbeddingBody):
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
    index: int | None = None  # where a client sends back what a stream told it


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    function: FunctionTool


class FunctionName(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    function: FunctionName


class ChatBody(GenerationBody):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Tool] = []
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool] = {}


def check_ranges(body: msgspec.Struct) -> None:
    """Holds the numbers of `body` against RANGES. Raises RequestError (400); NaN is in no range."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name in RANGES and value is not None:
            low, high = RANGES[name]
            if not low <= value <= high:
                raise refusal(name, f"must be between {low} and {high}")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises RequestError (400) for more than a client may attach to an object."""
    if len(metadata) > MAX_METADATA:
        raise refusal("metadata", f"has more than {MAX_METADATA} entries")
    if any(len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS for key, value in metadata.items()):
        raise refusal("metadata", f"has a key above {MAX_KEY_CHARS} or a value above {MAX_VALUE_CHARS} characters")


def convert(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> Any:
    """`fields` as the struct `kind`, types strict; a field that is null counts as absent, wherever it stands. Raises
    RequestError (400) that names the field, never its value."""
    fields = present(fields, kind)
    for name in fields:
        if name not in kind.__struct_encode_fields__:
            raise unknown_field(name)
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _refusal_of(str(error)) from None


def present(value: Any, kind: type[msgspec.Struct]) -> Any:
    """What is to be a `kind`, or several, less the fields that are null. In a client's own objects, a schema or the
    arguments of a call, null is a value."""
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
    """By field of `kind` the struct that stands in it."""
    found = {field.encode_name: _struct_in(field.type) for field in inspect.type_info(kind).fields}
    return {name: inner for name, inner in found.items() if inner is not None}


def _struct_in(of: inspect.Type) -> type[msgspec.Struct] | None:
    if isinstance(of, inspect.StructType):
        return of.cls
    if isinstance(of, inspect.ListType):
        return _struct_in(of.item_type)
    choices = map(_struct_in, of.types if isinstance(of, inspect.UnionType) else ())
    return next((inner for inner in choices if inner is not None), None)


def unknown_field(name: Any) -> RequestError:
    """The 400 of a field that stands nowhere."""
    param = _showable(name)
    return RequestError(400, f"Unknown field '{param}'.", param=param, code="unknown_field")


def _refusal_of(complaint: str) -> RequestError:
    """msgspec's words, which name types and places but may quote an unknown field, in ours."""
    what, _, place = complaint.rpartition(" - at `$") if " - at `$" in complaint else (complaint, "", "")
    place = place.rstrip("`").lstrip(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return unknown_field(f"{place}.{unknown[1]}")
    if absent := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return missing(f"{place}.{absent[1]}".lstrip("."))
    param = _showable(place)
    return RequestError(400, f"'{param}' has the wrong type: {what.replace('`', '').lower()}.", param=param)


def _showable(name: Any) -> str:
    """A name that a client made up, as far as it may stand in an answer or a log."""
    text = name if isinstance(name, str) else "?"
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:64])
