"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from service.gateway.core.refusals import refusal
from service.gateway.core.request import CHAT, Prompt
from service.gateway.core.served_model import ServedModel
from service.gateway.openai.messages import plain_messages
from service.gateway.openai.request_bodies import Message, Tool, check_part_types, convert
from service.gateway.openai.request_reader import read_request
from service.gateway.openai.strict_json import decode_object


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    parse_special: bool = False
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    tokens: list[int]


def tokenize(model: ServedModel, data: bytes, adapters: Container[str] = ()) -> dict[str, Any]:
    """Return `tokens`, their `count`, and `token_strs` if requested. Raises RequestError (400, 404).

    `adapters`: those loaded at run time.
    """
    fields = decode_object(data)
    plain = {**fields, "messages": plain_messages(fields["messages"])} if "messages" in fields else fields
    check_part_types(plain.get("tools"), ("function",), "tools")
    body = convert(plain, TokenizeBody)
    model.require(body.model, adapters)
    adds = body.add_special_tokens is not False
    ids = model.encode(_prompt(model, body, fields), adds, parse_special=body.parse_special)
    texts = [model.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "tokens": ids, "token_strs": texts}


def detokenize(model: ServedModel, data: bytes, adapters: Container[str] = ()) -> dict[str, Any]:
    """Return the text of `tokens`, including special tokens, as `prompt`. Raises RequestError (400, 404)."""
    body = convert(decode_object(data), DetokenizeBody)
    model.require(body.model, adapters)
    model.check_ids(body.tokens, "tokens")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


CHAT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def _prompt(model: ServedModel, body: TokenizeBody, fields: dict[str, Any]) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise refusal("prompt", "or 'messages' is required, and not both")
    if body.prompt is not None:
        for name in ("tools", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name):
                raise refusal(name, "needs 'messages'")
        return body.prompt
    if body.parse_special:
        raise refusal("parse_special", "needs 'prompt': in messages special tokens are plain text")
    if body.add_special_tokens:
        raise refusal("add_special_tokens", "cannot be true with 'messages', whose template adds them")
    chat = read_request(CHAT, {name: fields[name] for name in CHAT_FIELDS if name in fields})
    model.check_tools(chat.tools)
    return chat.prompts[0]
