"""Generates `/openapi.json` from the types and ranges that parse requests."""

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
    "404": "No such model, object or route.",
    "408": "The body did not arrive in time.",
    "409": "The Idempotency-Key was used for another request.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests of this client; Retry-After says when to retry.",
    "500": "Internal error, with an incident number.",
    "503": "Overloaded, draining, or without its queue; Retry-After says when to retry.",
    "504": "The request exceeded its deadline.",
}


BOUNDS: Mapping[str, Mapping[str, Json]] = {
    "CompletionBody": {"prompt": {"minLength": 1, "minItems": 1}, "max_tokens": {"minimum": 0}},  # 0 with `echo`
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
"""Limits that the types do not express. Dependencies between fields appear only in errors."""


HEADERS = frozenset({"Last-Event-ID"})
PAGE = ("limit", "after")
NUMBER: Json = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
OPTIONAL_PARAMETERS: Mapping[str, tuple[str, Json]] = {
    "limit": ("Maximum number of items.", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
    "after": ("Only items after the one with this id.", {"type": "string"}),
    "order": ("Order by age; desc: newest first.", {"enum": ["asc", "desc"], "default": "desc"}),
    "purpose": ("Only files of this purpose.", {"type": "string"}),
    "stream": ("true: answer with server-sent events.", {"enum": ["true", "false"]}),
    "starting_after": ("Sequence number of the last event that the client has.", NUMBER),
    "Last-Event-ID": ("Id of the last event that the client has.", NUMBER),
}
"""Optional parameters outside path and body."""


def openapi_document(version: str, model_name: str, *, keys_required: bool, root_path: str = "") -> Json:
    """Return the OpenAPI 3.1 document for a gateway."""
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
    """Add ranges, idle fields, and null, which counts as absent."""
    properties = schema.get("properties", {})
    for field, what in properties.items():
        if field in RANGES and name in IDLE:
            _bound(what, *RANGES[field])
    if name in IDLE or name in ("TokenizeBody", "DetokenizeBody"):
        schema["additionalProperties"] = {"type": "null"}  # counts as absent
    for field, more in BOUNDS.get(name, {}).items():
        for form in properties[field].get("anyOf", [properties[field]]):
            form |= {word: bound for word, bound in more.items() if _fits(word, form["type"])}
            if "enum" in form:
                del form["type"]
    required = set(schema.get("required", ()))
    for field, accepted in IDLE.get(name, {}).items():
        properties[field] = {
            "enum": [*accepted],
            "description": "Accepted with values that change nothing; any other is refused by name.",
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
    return {**_generation_paths(), **_embedding_paths(), **_batch_paths(), **_model_paths(), **_probe_paths()}


def _generation_paths() -> Json:
    headers = {
        "Idempotency-Key": "A repeated key with the same body returns the first request's answer.",
        "X-Request-Id": "The client's id of the request, at most 128 visible ASCII characters.",
    }
    return {
        COMPLETIONS: {
            "post": _operation_with_body("CompletionBody", "Completion", "Complete a text.", headers, streams=True)
        },
        CHAT: {
            "post": _operation_with_body("ChatBody", "ChatCompletion", "Answer a conversation.", headers, streams=True)
        },
        **_response_paths(headers),
        **_message_paths(headers),
        INVOCATIONS: {"post": _invocation(headers)},
        "/v1/requests/{id}": {
            "get": _with_stream(
                _operation("RequestState", "Get a request's state, or its events if Accept asks for them.", of="id"),
                "Last-Event-ID",
            ),
            "delete": _operation("RequestState", "Cancel a request.", of="id"),
        },
    }


def _embedding_paths() -> Json:
    return {
        EMBEDDINGS: {
            "post": _operation_with_body("EmbeddingBody", "EmbeddingList", "Embed texts (--enable-embeddings).")
        },
        POOLING: {"post": _operation_with_body("PoolingBody", "PoolingList", "Embed texts, in vLLM's form.")},
        **{
            path: {"post": _operation_with_body("ScoreBody", "ScoreList", "Compare pairs of texts.")}
            for path in SCORE_PATHS
        },
        **{
            path: {"post": _operation_with_body("RerankBody", "Ranking", "Rank documents by similarity to a query.")}
            for path in RERANK_PATHS
        },
    }


def _batch_paths() -> Json:
    return {
        "/v1/files": {
            "get": _with_parameters(_operation("FileList", "List files."), *PAGE, "order", "purpose"),
            "post": _upload(),
        },
        "/v1/files/{file_id}": {
            "get": _operation("File", "Get a file's metadata.", of="file_id"),
            "delete": _operation("FileDeleted", "Delete a file.", of="file_id"),
        },
        "/v1/files/{file_id}/content": {"get": _content()},
        "/v1/batches": {
            "get": _with_parameters(_operation("BatchList", "List batches, newest first."), *PAGE),
            "post": _operation_with_body("BatchBody", "Batch", "Run a file of requests while no other request waits."),
        },
        "/v1/batches/{batch_id}": {"get": _operation("Batch", "Get a batch's state.", of="batch_id")},
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("Batch", "Cancel a batch; finished answers are kept.", of="batch_id")
        },
    }


def _model_paths() -> Json:
    return {
        LOAD: {"post": _plain_text("LoadAdapterBody", "Load a LoRA adapter (--enable-lora --lora-dir).")},
        UNLOAD: {"post": _plain_text("UnloadAdapterBody", "Unload a LoRA adapter.")},
        "/v1/models": {"get": _operation("ModelList", "List the served model and its adapters.")},
        "/v1/models/{model}": {"get": _operation("Model", "Get the served model or an adapter by name.", of="model")},
        "/tokenize": {
            "post": _operation_with_body("TokenizeBody", "Tokens", "Convert a text or a conversation to token ids.")
        },
        "/detokenize": {"post": _operation_with_body("DetokenizeBody", "Detokenized", "Convert token ids to text.")},
        "/version": {"get": _operation("Version", "Get the version of Quire.")},
        "/server_info": {"get": _operation("ServerInfo", "Get the model, its parsers and the limits of a request.")},
    }


def _probe_paths() -> Json:
    return {
        "/livez": {"get": _operation("Status", "Liveness: the process runs.", open_to_all=True)},
        "/readyz": {
            "get": _operation("Readiness", "Readiness: a request would run now.", open_to_all=True, or_503=True)
        },
        "/health": {"get": _operation("Readiness", "Readiness, under vLLM's name.", open_to_all=True, or_503=True)},
        "/ping": {
            method: _operation("Readiness", "Readiness, under SageMaker's name.", open_to_all=True, or_503=True)
            for method in ("get", "post")
        },
    }


def _response_paths(headers: Mapping[str, str]) -> Json:
    one, of = f"{RESPONSES}/{{response_id}}", "response_id"
    return {
        RESPONSES: {
            "post": _operation_with_body(
                "ResponseBody", "Response", "Answer a conversation and store it.", headers, streams=True
            )
        },
        f"{RESPONSES}/input_tokens": {
            "post": _operation_with_body("ResponseBody", "InputTokens", "Count the tokens of a conversation.")
        },
        one: {
            "get": _with_stream(
                _operation("Response", "Get a response, finished or not.", of=of), "starting_after", "Last-Event-ID"
            ),
            "delete": _operation("ResponseDeleted", "Delete a response.", of=of),
        },
        f"{one}/cancel": {"post": _operation("Response", "Cancel a background response.", of=of)},
        f"{one}/input_items": {
            "get": _with_parameters(
                _operation("ResponseItems", "List the input items of a response.", of=of), *PAGE, "order"
            )
        },
    }


def _message_paths(headers: Mapping[str, str]) -> Json:
    made = _operation_with_body(
        "MessagesBody", "AnthropicMessage", "Answer a conversation, in Anthropic's form.", headers, streams=True
    )
    counted = _operation_with_body("CountBody", "TokenCount", "Count the tokens of a conversation.")
    for path in (made, counted):
        for status in REFUSALS:
            path["responses"][status]["content"]["application/json"]["schema"] = _ref("AnthropicRefusal")
    return {MESSAGES: {"post": made}, f"{MESSAGES}/count_tokens": {"post": counted}}


def _operation_with_body(
    body: str, answer: str, summary: str, headers: Mapping[str, str] | None = None, *, streams: bool = False
) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {"200": {"description": summary, "content": content}, **_refusals(REFUSALS)}
    if streams:
        accepted = {"application/json": {"schema": {"type": "object"}}}
        responses["202"] = {"description": "Runs in the background; its state is under its id.", "content": accepted}
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
    operation = _operation_with_body(
        "ChatBody",
        "ChatCompletion",
        "Run a chat, a completion or embeddings, by the body's fields.",
        headers,
        streams=True,
    )
    for content, names in (
        (operation["requestBody"]["content"], ("ChatBody", "CompletionBody", "EmbeddingBody")),
        (operation["responses"]["200"]["content"], ("ChatCompletion", "Completion", "EmbeddingList")),
    ):
        content["application/json"] = {"schema": {"anyOf": [_ref(name) for name in names]}}
    return operation


def _plain_text(body: str, summary: str) -> Json:
    path = _operation_with_body(body, "Status", summary)
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
        **_operation("File", "Upload a file of requests, one JSON object per line."),
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
    }


def _content() -> Json:
    operation = _operation("File", "Download a file.", of="file_id")
    operation["responses"]["200"]["content"] = {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }
    return operation


def _operation(
    answer: str, summary: str, *, open_to_all: bool = False, or_503: bool = False, of: str | None = None
) -> Json:
    content = {"application/json": {"schema": _ref(answer)}}
    responses = {"200": {"description": summary, "content": content}, **_refusals(REFUSALS)}
    if or_503:
        responses["503"] = {"description": "Not ready; the body says what is missing.", "content": content}
    path = [] if of is None else [{"name": of, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "summary": summary,
        "parameters": path,
        "responses": responses,
        **({"security": []} if open_to_all else {}),
    }


def _with_parameters(operation: Json, *names: str) -> Json:
    more = [
        {"name": name, "in": "header" if name in HEADERS else "query", "description": text, "schema": schema}
        for name, (text, schema) in OPTIONAL_PARAMETERS.items()
        if name in names
    ]
    return {**operation, "parameters": [*operation["parameters"], *more]}


def _with_stream(operation: Json, *names: str) -> Json:
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return _with_parameters(operation, "stream", *names)


def _refusals(statuses: Any) -> Json:
    return {
        status: {"description": REFUSALS[status], "content": {"application/json": {"schema": _ref("Refusal")}}}
        for status in statuses
    }


def _ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}
