"""`/openapi.json`, generated from the types and ranges that parse requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from service import typed_decoding
from service.gateway.anthropic.messages_body import (
    IDLE_COUNT_FIELDS,
    IDLE_MESSAGES_FIELDS,
    PARTS_OF_ROLE,
    CountBody,
    MessagesBody,
)
from service.gateway.batches.batches import WINDOWS_S, BatchBody
from service.gateway.core.request import BATCH_ENDPOINTS, CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, POOLING, RESPONSES
from service.gateway.openai.json_objects import Json
from service.gateway.openai.messages import ROLES
from service.gateway.openai.request_bodies import (
    IDLE_CHAT_FIELDS,
    IDLE_COMPLETION_FIELDS,
    IDLE_EMBEDDING_FIELDS,
    IDLE_MESSAGE_FIELDS,
    IDLE_POOLING_FIELDS,
    IDLE_RESPONSE_FIELDS,
    RANGES,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Idle,
    PoolingBody,
)
from service.gateway.openai.responses.body import ResponseBody
from service.gateway.openapi import answers
from service.gateway.routes.adapters import LOAD, UNLOAD, LoadAdapterBody, UnloadAdapterBody
from service.gateway.routes.invocations import INVOCATIONS
from service.gateway.routes.pages import MAX_PAGE
from service.gateway.routes.scores import RERANK_PATHS, SCORE_PATHS, RerankBody, ScoreBody
from service.gateway.routes.tokenization import DetokenizeBody, TokenizeBody

REF = "#/components/schemas/{name}"
BODIES: tuple[type[msgspec.Struct], ...] = (
    *(CompletionBody, ChatBody, ResponseBody, MessagesBody, CountBody, EmbeddingBody, PoolingBody),
    *(ScoreBody, RerankBody, TokenizeBody, DetokenizeBody, BatchBody, LoadAdapterBody),
    UnloadAdapterBody,
)
IDLE: Mapping[str, Idle] = {
    "CompletionBody": IDLE_COMPLETION_FIELDS,
    "ChatBody": IDLE_CHAT_FIELDS,
    "Message": IDLE_MESSAGE_FIELDS,
    "ResponseBody": IDLE_RESPONSE_FIELDS,
    "MessagesBody": IDLE_MESSAGES_FIELDS,
    "CountBody": IDLE_COUNT_FIELDS,
    "EmbeddingBody": IDLE_EMBEDDING_FIELDS,
    "PoolingBody": IDLE_POOLING_FIELDS,
}
REFUSALS = {
    "400": "A field is wrong or not supported; `param` names it.",
    "401": "A valid API key is required.",
    "404": "There is no such model or route.",
    "408": "The body did not arrive in time.",
    "409": "The Idempotency-Key stands for another request.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests of this client.",
    "500": "A fault of the server, with an incident number.",
    "503": "Overloaded, draining, or without its queue; Retry-After says when to come again.",
    "504": "The request ran past its deadline.",
}


TIGHTER: Mapping[str, Mapping[str, Json]] = {
    "CompletionBody": {"prompt": {"minLength": 1, "minItems": 1}, "max_tokens": {"minimum": 0}},  # 0: with `echo`
    "EmbeddingBody": {"input": {"minLength": 1, "minItems": 1}, "encoding_format": {"enum": ["float", "base64"]}},
    "PoolingBody": {"input": {"minLength": 1, "minItems": 1}, "encoding_format": {"enum": ["float", "base64"]}},
    "ChatBody": {"messages": {"minItems": 1}},
    "Message": {"role": {"enum": [*ROLES]}},
    "ResponseBody": {"input": {"minLength": 1, "minItems": 1}},
    "MessagesBody": {"messages": {"minItems": 1}},
    "CountBody": {"messages": {"minItems": 1}},
    "Turn": {"role": {"enum": [*PARTS_OF_ROLE]}, "content": {"minItems": 1}},
    "DetokenizeBody": {"tokens": {"items": {"type": "integer", "minimum": 0}}},
    "BatchBody": {"endpoint": {"enum": [*BATCH_ENDPOINTS]}, "completion_window": {"enum": [*WINDOWS_S]}},
}
"""Limits that the types do not express. Dependencies between fields are only in refusals."""


HEADERS = frozenset({"Last-Event-ID"})
PAGE = ("limit", "after")
NUMBER: Json = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
ASKED: Mapping[str, tuple[str, Json]] = {
    "limit": ("So many at most.", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
    "after": ("Those behind the one of this id.", {"type": "string"}),
    "order": ("By age: desc is the newest first.", {"enum": ["asc", "desc"], "default": "desc"}),
    "purpose": ("Files of this purpose alone.", {"type": "string"}),
    "stream": ("true: as events.", {"enum": ["true", "false"]}),
    "starting_after": ("The sequence number of the last event that is known.", NUMBER),
    "Last-Event-ID": ("The id of the last event that is known.", NUMBER),
}
"""Optional parameters besides path and body."""


def openapi_document(version: str, model_name: str, *, keys_required: bool, root_path: str = "") -> Json:
    """Return the OpenAPI 3.1 document of a gateway that serves this model."""
    schemas = typed_decoding.schemas_of((*BODIES, *answers.ANSWERS), REF)
    for name, schema in schemas.items():
        if name in _REQUEST_PARTS or name in {body.__name__ for body in BODIES}:
            if "model" in schema["properties"]:
                schema["properties"]["model"] = {"enum": [model_name]}
            _widen(name, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "description": "OpenAI's API over a paged KV cache."},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{"key": []}, {"x-api-key": []}] if keys_required else [],
        "paths": _paths(),
    }


_REQUEST_PARTS = (
    *("Message", "StreamOptions", "ResponseFormat", "JsonSchemaFormat", "StructuredOutputs"),
    *("TextConfig", "TextFormat", "ResponseTool", "Turn"),
)


def _widen(name: str, schema: Json) -> None:
    """Add ranges, fields accepted without effect, and null, which counts as absent."""
    properties = schema.get("properties", {})
    for field, what in properties.items():
        if field in RANGES and name in IDLE:
            _bound(what, *RANGES[field])
    if name in IDLE or name in ("TokenizeBody", "DetokenizeBody"):
        schema["additionalProperties"] = {"type": "null"}  # counts as absent
    for field, more in TIGHTER.get(name, {}).items():
        for form in properties[field].get("anyOf", [properties[field]]):
            form |= {word: bound for word, bound in more.items() if _fits(word, form["type"])}
            if "enum" in form:
                del form["type"]
    required = set(schema.get("required", ()))
    for field, accepted in IDLE.get(name, {}).items():
        properties[field] = {
            "enum": [*accepted],
            "description": "Accepted with a value that changes nothing, refused by name with any other.",
        }
    for field, what in properties.items():
        if field not in required:
            properties[field] = _or_null(what)


def _fits(word: str, kind: str) -> bool:
    return {"minLength": "string", "minItems": "array", "items": "array", "minimum": "integer"}.get(word, kind) == kind


def _bound(schema: Json, low: float, high: float) -> None:
    for form in schema.get("anyOf", [schema]):
        if form["type"] in ("integer", "number"):
            form |= {"minimum": low, "maximum": high}


def _or_null(schema: Json) -> Json:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    forms = schema.get("anyOf", [schema])
    return schema if {"type": "null"} in forms else {"anyOf": [*forms, {"type": "null"}]}


def _paths() -> Json:
    generation = {
        "Idempotency-Key": "The same key and body find the first request's answer instead of making a second one.",
        "X-Request-Id": "The client's id of the request, at most 128 visible ASCII characters.",
    }
    return {
        COMPLETIONS: {"post": _post("CompletionBody", "Completion", "Go on with a text.", generation, streams=True)},
        CHAT: {"post": _post("ChatBody", "ChatCompletion", "Answer a conversation.", generation, streams=True)},
        **_response_paths(generation),
        **_message_paths(generation),
        EMBEDDINGS: {"post": _post("EmbeddingBody", "EmbeddingList", "Texts as vectors, where that is enabled.")},
        POOLING: {"post": _post("PoolingBody", "PoolingList", "The same, in vLLM's shape.")},
        **{path: {"post": _post("ScoreBody", "ScoreList", "The likeness of texts.")} for path in SCORE_PATHS},
        **{
            path: {"post": _post("RerankBody", "Ranking", "Documents by likeness to a query.")} for path in RERANK_PATHS
        },
        INVOCATIONS: {"post": _invocation(generation)},
        "/v1/files": {
            "get": _asking(_get("FileList", "Your files, the newest first."), *PAGE, "order", "purpose"),
            "post": _upload(),
        },
        "/v1/files/{file_id}": {
            "get": _get("File", "What a file is.", of="file_id"),
            "delete": _get("FileDeleted", "Forget a file.", of="file_id"),
        },
        "/v1/batches": {
            "get": _asking(_get("BatchList", "Your batches, the newest first."), *PAGE),
            "post": _post("BatchBody", "Batch", "Work on a file of requests when nothing else waits."),
        },
        "/v1/batches/{batch_id}": {"get": _get("Batch", "How far a batch is.", of="batch_id")},
        "/v1/batches/{batch_id}/cancel": {"post": _get("Batch", "End a batch; answers so far stay.", of="batch_id")},
        "/v1/files/{file_id}/content": {"get": _content()},
        "/v1/requests/{id}": {
            "get": _streaming(
                _get("RequestState", "How far a request is; its stream again, where Accept asks for one.", of="id"),
                "Last-Event-ID",
            ),
            "delete": _get("RequestState", "End a request.", of="id"),
        },
        LOAD: {"post": _sentence("LoadAdapterBody", "Serve a LoRA adapter, where that is enabled.")},
        UNLOAD: {"post": _sentence("UnloadAdapterBody", "Serve it no longer.")},
        "/v1/models": {"get": _get("ModelList", "The model that is served, and its adapters.")},
        "/v1/models/{model}": {"get": _get("Model", "The same by its name.", of="model")},
        "/tokenize": {"post": _post("TokenizeBody", "Tokens", "A text or a conversation as token ids.")},
        "/detokenize": {"post": _post("DetokenizeBody", "Detokenized", "Token ids as text.")},
        "/version": {"get": _get("Version", "The version of the software.")},
        "/server_info": {"get": _get("ServerInfo", "The model, its parsers and the limits of a request.")},
        "/livez": {"get": _get("Status", "Whether the process lives.", open_to_all=True)},
        "/readyz": {
            "get": _get("Readiness", "Whether a request would be worked on now.", open_to_all=True, or_503=True)
        },
        "/health": {"get": _get("Readiness", "The same, by vLLM's name.", open_to_all=True, or_503=True)},
        "/ping": {
            method: _get("Readiness", "The same, by SageMaker's name.", open_to_all=True, or_503=True)
            for method in ("get", "post")
        },
    }


def _response_paths(headers: Mapping[str, str]) -> Json:
    one, of = f"{RESPONSES}/{{response_id}}", "response_id"
    return {
        RESPONSES: {
            "post": _post("ResponseBody", "Response", "Answer, and keep the conversation.", headers, streams=True)
        },
        one: {
            "get": _streaming(_get("Response", "How far a response is.", of=of), "starting_after", "Last-Event-ID"),
            "delete": _get("ResponseDeleted", "Forget a response.", of=of),
        },
        f"{one}/cancel": {"post": _get("Response", "End one that runs in the background.", of=of)},
        f"{one}/input_items": {
            "get": _asking(_get("ResponseItems", "What it was made from, the newest first.", of=of), *PAGE, "order")
        },
    }


def _message_paths(headers: Mapping[str, str]) -> Json:
    made = _post(
        "MessagesBody", "AnthropicMessage", "Answer a conversation, in Anthropic's form.", headers, streams=True
    )
    counted = _post("CountBody", "TokenCount", "The number of tokens in a conversation.")
    for path in (made, counted):
        for status in REFUSALS:
            path["responses"][status]["content"]["application/json"]["schema"] = _ref("AnthropicRefusal")
    return {MESSAGES: {"post": made}, f"{MESSAGES}/count_tokens": {"post": counted}}


def _post(
    body: str, answer: str, summary: str, headers: Mapping[str, str] | None = None, *, streams: bool = False
) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {"200": {"description": summary, "content": content}, **_refusals(REFUSALS)}
    if streams:
        accepted = {"application/json": {"schema": {"type": "object"}}}
        responses["202"] = {"description": "Runs in the background: look under its id.", "content": accepted}
    parameters = [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"}}
        for name, text in (headers or {}).items()
    ]
    return {
        "summary": summary,
        "parameters": parameters,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": responses,
    }


def _invocation(headers: Mapping[str, str]) -> Json:
    told = _post("ChatBody", "ChatCompletion", "A chat, a completion or embeddings.", headers, streams=True)
    for content, names in (
        (told["requestBody"]["content"], ("ChatBody", "CompletionBody", "EmbeddingBody")),
        (told["responses"]["200"]["content"], ("ChatCompletion", "Completion", "EmbeddingList")),
    ):
        content["application/json"] = {"schema": {"anyOf": [_ref(name) for name in names]}}
    return told


def _sentence(body: str, summary: str) -> Json:
    path = _post(body, "Status", summary)
    path["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return path


def _upload() -> Json:
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "additionalProperties": False,
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
    }
    return {
        **_get("File", "Keep a file of requests, one JSON object a line."),
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
    }


def _content() -> Json:
    told = _get("File", "The bytes of a file.", of="file_id")
    told["responses"]["200"]["content"] = {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }
    return told


def _get(answer: str, summary: str, *, open_to_all: bool = False, or_503: bool = False, of: str | None = None) -> Json:
    content = {"application/json": {"schema": _ref(answer)}}
    responses = {"200": {"description": summary, "content": content}, **_refusals(REFUSALS)}
    if or_503:
        responses["503"] = {"description": "Not ready, and what is missing.", "content": content}
    path = [] if of is None else [{"name": of, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "summary": summary,
        "parameters": path,
        "responses": responses,
        **({"security": []} if open_to_all else {}),
    }


def _asking(told: Json, *names: str) -> Json:
    more = [
        {"name": name, "in": "header" if name in HEADERS else "query", "description": text, "schema": schema}
        for name, (text, schema) in ASKED.items()
        if name in names
    ]
    return {**told, "parameters": [*told["parameters"], *more]}


def _streaming(told: Json, *names: str) -> Json:
    told["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return _asking(told, "stream", *names)


def _refusals(statuses: Any) -> Json:
    return {
        status: {"description": REFUSALS[status], "content": {"application/json": {"schema": _ref("Refusal")}}}
        for status in statuses
    }


def _ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}
