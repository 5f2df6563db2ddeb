"""What form an answer must have, in the words of OpenAI (response_format) and of vLLM (guided_..., structured_outputs),
as one grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from model.grammar import COMPACT, WHITESPACE, GrammarError, of_choice, of_grammar, of_json, of_regex
from service.gateway.generation.refusals import grammar_refusal, missing, refusal
from service.gateway.generation.request import GrammarWish
from service.gateway.openai.bodies import GenerationBody, ResponseFormat, StructuredOutputs
from service.gateway.openai.strict_json import MAX_DEPTH, decode_value, depth_exceeds

BACKENDS = ("auto", "guidance", "llguidance")
_OF_FORM: Mapping[str, Callable[..., str]] = {
    "json": lambda schema, whitespace: of_json(schema, whitespace=whitespace),
    "json_object": lambda _, whitespace: of_json({"type": "object"}, whitespace=whitespace),
    "regex": lambda pattern, _: of_regex(pattern),
    "choice": lambda choices, _: of_choice(choices),
    "grammar": lambda text, _: of_grammar(text),
}
"""The forms that vLLM knows, in its words; a wish that is None or false asks for nothing."""


def read_grammar(body: GenerationBody) -> GrammarWish | None:
    """The one form that `body` asks for, if any. Raises RequestError (400) for several, or one that cannot be."""
    wishes = [wish for wish in (*_response_format(body.response_format), *_guided(body), *_structured(body)) if wish]
    if not wishes:
        return None
    if len(wishes) > 1:
        raise refusal(wishes[1][0], f"cannot go with '{wishes[0][0]}'")
    param, make = wishes[0]
    try:
        return GrammarWish(make(), param)
    except GrammarError as error:
        raise grammar_refusal(error, param) from None


Wish = tuple[str, Callable[[], str]]
"""The field it stands in, and what makes its grammar."""


def _response_format(asked: ResponseFormat | None) -> list[Wish]:
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
        return [(param, lambda: of_json({"type": "object"}))]
    if asked.json_schema is None:
        raise missing("response_format.json_schema")
    schema = asked.json_schema.schema
    # As at OpenAI: only a strict schema is refused for keywords that nobody here knows.
    is_lenient = not asked.json_schema.strict
    return [(param, lambda: of_json({"type": "object"} if schema is None else schema, lenient=is_lenient))]


def _guided(body: GenerationBody) -> list[Wish]:
    if body.guided_decoding_backend not in (None, *BACKENDS):
        raise refusal("guided_decoding_backend", f"must be one of {', '.join(BACKENDS)}")
    whitespace = WHITESPACE if body.guided_whitespace_pattern is None else body.guided_whitespace_pattern
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        raise refusal("guided_whitespace_pattern", "needs 'guided_json'")
    return [
        (f"guided_{form}", _maker(form, wish, whitespace, f"guided_{form}"))
        for form in ("json", "regex", "choice", "grammar")
        if (wish := getattr(body, f"guided_{form}")) is not None
    ]


def _structured(body: GenerationBody) -> list[Wish]:
    asked, param = body.structured_outputs, "structured_outputs"
    if asked is None:
        return []
    if asked.disable_additional_properties:
        raise refusal(f"{param}.disable_additional_properties", "is not supported here when true")
    for name in ("whitespace_pattern", "disable_any_whitespace"):
        if getattr(asked, name) not in (None, False) and asked.json is None and not asked.json_object:
            raise refusal(f"{param}.{name}", "needs 'json' or 'json_object'")
    wishes = [
        (f"{param}.{form}", _maker(form, wish, _whitespace(asked), f"{param}.{form}"))
        for form in _OF_FORM
        if (wish := getattr(asked, form)) not in (None, False)
    ]
    if not wishes:
        raise refusal(param, f"must hold one of {', '.join(_OF_FORM)}")
    return wishes


def _whitespace(asked: StructuredOutputs) -> str:
    if asked.disable_any_whitespace:
        return COMPACT
    return WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern


def _maker(form: str, wish: Any, whitespace: str, param: str) -> Callable[[], str]:
    if form == "json" and isinstance(wish, str):
        wish = decode_value(wish, param)
    if depth_exceeds(wish, MAX_DEPTH):
        raise refusal(param, "is nested too deeply")
    return lambda: _OF_FORM[form](wish, whitespace)
