"""Text to token ids and back for clients who want to see them, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec

from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import Conversation
from service.gateway.generation.served_model import ServedModel
from service.gateway.openai.bodies import Message, convert
from service.gateway.openai.messages import conversation, plain_messages
from service.gateway.openai.strict_json import decode_object


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    tokens: list[int]


def tokenize(model: ServedModel, data: bytes) -> dict[str, Any]:
    """`tokens`, their `count`, and `token_strs` where asked for. Raises RequestError (400, 404)."""
    fields = decode_object(data)
    if "messages" in fields:
        fields["messages"] = plain_messages(fields["messages"])
    body = convert(fields, TokenizeBody)
    model.require(model.name if body.model is None else body.model)
    ids = model.encode(_prompt(body), body.add_special_tokens is not False)
    texts = [model.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "tokens": ids, "token_strs": texts}


def detokenize(model: ServedModel, data: bytes) -> dict[str, Any]:
    """`prompt`: the text of `tokens`, special tokens spelt out. Raises RequestError (400, 404)."""
    body = convert(decode_object(data), DetokenizeBody)
    model.require(model.name if body.model is None else body.model)
    model.check_ids(body.tokens, "tokens")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _prompt(body: TokenizeBody) -> str | Conversation:
    if (body.prompt is None) == (body.messages is None):
        raise refusal("prompt", "or 'messages' must be given, one of them")
    if body.messages is not None:
        if body.add_special_tokens:
            raise refusal("add_special_tokens", "cannot be true with 'messages', whose template adds them")
        return conversation(body.messages, body.add_generation_prompt, {})
    return body.prompt
