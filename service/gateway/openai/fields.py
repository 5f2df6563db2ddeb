"""Fields of OpenAI's and vLLM's requests that change nothing here: the values that ask for nothing, for each.

Such a field is accepted with one of these values, or null, and refused by name with any other, so that no wish is ever
silently ignored. A field that stands neither here nor in `bodies` is unknown, and refused by name too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.errors import RequestError

Idle = Mapping[str, tuple[Any, ...]]

_BOTH: Idle = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "request_id": (),
    "cache_salt": (),
    "prompt_cache_key": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
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
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}

IDLE_RESPONSE_FIELDS: Idle = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning": ({}, {"effort": "none"}),
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

IDLE_TEXT_FIELDS: Idle = {"verbosity": ("medium",)}

IDLE_ITEM_FIELDS: Idle = {
    "phase": (),
    "caller": (),
    "namespace": (),
    "async": (False,),
}

IDLE_MESSAGE_FIELDS: Idle = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
    "provider_specific_fields": ({},),  # litellm sends back its own
}


def without_idle_fields(fields: Mapping[str, Any], idle: Idle, where: str = "") -> dict[str, Any]:
    """`fields` less those that are null or ask for nothing.

    Raises RequestError (400) for a field of `idle` that asks for something; `where` stands before its name.
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
            param = where + name
            raise RequestError(400, f"'{param}' is not supported here{_hint(idle[name])}.", param=param)
    return left


def _hint(accepted: tuple[Any, ...]) -> str:
    return "" if not accepted else " with any but its default value"
