"""Reads the requested output format: OpenAI's `response_format`, vLLM's `guided_...` or `structured_outputs`."""

from __future__ import annotations

from typing import Any

from model.text.grammar import COMPACT, WHITESPACE
from model.text.grammar_task import SPEC_KINDS, GrammarSpec
from service.gateway.core.refusals import missing, refusal
from service.gateway.core.request import RequestedGrammar
from service.gateway.openai.request_bodies import GenerationBody, ResponseFormat, StructuredOutputs
from service.gateway.openai.strict_json import MAX_DEPTH, decode_value, depth_exceeds

BACKENDS = ("auto", "guidance", "llguidance")
JSON_OBJECT = {"type": "object"}
FORMS = ("json", "json_object", *(kind for kind in SPEC_KINDS if kind != "json"))
"""vLLM's names of formats; None or false requests nothing."""


def read_grammar(body: GenerationBody) -> RequestedGrammar | None:
    """Return the format that `body` requests, if any. Raises RequestError (400) for an invalid one or several."""
    requested = [*_response_format(body.response_format), *_guided(body), *_structured(body)]
    if not requested:
        return None
    if len(requested) > 1:
        raise refusal(requested[1].param, f"cannot go with '{requested[0].param}'")
    return requested[0]


def _response_format(asked: ResponseFormat | None) -> list[RequestedGrammar]:
    if asked is None:
        return []
    param = "response_format"
    if asked.type not in ("text", "json_object", "json_schema"):
        raise refusal("response_format.type", "must be one of text, json_object, json_schema")
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise refusal("response_format.json_schema", "needs the type json_schema")
    if asked.type == "text":
        return []
    if asked.type == "json_object":
        return [RequestedGrammar(GrammarSpec("json", JSON_OBJECT), param)]
    if asked.json_schema is None:
        raise missing("response_format.json_schema")
    schema = asked.json_schema.schema
    # As at OpenAI, only a strict schema is refused for unknown keywords.
    is_lenient = not asked.json_schema.strict
    return [RequestedGrammar(GrammarSpec("json", JSON_OBJECT if schema is None else schema, lenient=is_lenient), param)]


def _guided(body: GenerationBody) -> list[RequestedGrammar]:
    if body.guided_decoding_backend not in (None, *BACKENDS):
        raise refusal("guided_decoding_backend", f"must be one of {', '.join(BACKENDS)}")
    whitespace = WHITESPACE if body.guided_whitespace_pattern is None else body.guided_whitespace_pattern
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        raise refusal("guided_whitespace_pattern", "needs 'guided_json'")
    return [
        _requested(form, value, whitespace, f"guided_{form}")
        for form in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{form}")) is not None
    ]


def _structured(body: GenerationBody) -> list[RequestedGrammar]:
    asked, param = body.structured_outputs, "structured_outputs"
    if asked is None:
        return []
    if asked.disable_additional_properties:
        raise refusal(f"{param}.disable_additional_properties", "is not supported here when true")
    for name in ("whitespace_pattern", "disable_any_whitespace"):
        if getattr(asked, name) not in (None, False) and asked.json is None and not asked.json_object:
            raise refusal(f"{param}.{name}", "needs 'json' or 'json_object'")
    requested = [
        _requested(form, value, _whitespace(asked), f"{param}.{form}")
        for form in FORMS
        if (value := getattr(asked, form)) not in (None, False)
    ]
    if not requested:
        raise refusal(param, f"must hold one of {', '.join(FORMS)}")
    return requested


def _whitespace(asked: StructuredOutputs) -> str:
    if asked.disable_any_whitespace:
        return COMPACT
    return WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern


def _requested(form: str, value: Any, whitespace: str, param: str) -> RequestedGrammar:
    if form == "json_object":
        return RequestedGrammar(GrammarSpec("json", JSON_OBJECT, whitespace), param)
    if form == "json" and isinstance(value, str):
        value = decode_value(value, param)
    if depth_exceeds(value, MAX_DEPTH):
        raise refusal(param, "is nested too deeply")
    return RequestedGrammar(GrammarSpec(form, value, whitespace), param)
