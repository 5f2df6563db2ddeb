"""A function's parameters, for models that write each separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.text.json_schema.compile import enforceable
from model.text.json_schema.core import Core, Kinds, kinds_of, values_of
from model.text.json_schema.document import Document, Place, count, mapping, names, schema_error
from model.text.json_schema.rewriter import ASSERTIONS, FORMATS, Rewriter

FREE = frozenset({"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"})
"""Object keywords that can be enforced when properties are written one by one."""
WRITTEN_ONE_BY_ONE = "cannot be enforced: this model writes each parameter separately"
TEXT_AMBIGUOUS = f"{WRITTEN_ONE_BY_ONE}, where text and other values are indistinguishable"
MAX_REFERENCES = 16


@dataclass(frozen=True)
class TextRule:
    pattern: str | None = None
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Parameter:
    """Parameter with `choices` (values), `rules` (on text) or `schema` (of JSON).

    `parameters` sets exactly one of them, `json_parameters` always `schema`.
    """

    name: str
    at: str  # JSON pointer
    kinds: Kinds
    is_required: bool
    choices: tuple[Any, ...] | None = None
    rules: tuple[TextRule, ...] | None = None
    schema: Mapping[str, Any] | None = None
    may_be_null: bool = False  # provably


def parameters(schema: Any, *, lenient: bool = False) -> list[Parameter]:
    """Return the parameters, written as text, in the schema's order. Raises GrammarError."""
    rewriter = Rewriter(Document(schema), lenient=lenient, formats=frozenset() if lenient else FORMATS)
    found = [_parameter(rewriter, *each) for each in _properties(rewriter)]
    return [parameter for parameter in found if parameter is not None]


def json_parameters(schema: Any, *, lenient: bool = False) -> list[Parameter]:
    """Return the parameters, each written as JSON. Raises GrammarError."""
    rewriter = Rewriter(Document(schema), lenient=lenient)
    found = []
    for name, place, is_required in _properties(rewriter):
        core = _body(rewriter, rewriter.allowed(place))
        if core is False and not is_required:
            continue
        values, kinds = values_of(core, rewriter) if _is_plain(core) else None, kinds_of(core, rewriter)
        found.append(
            Parameter(
                name,
                place.at,
                kinds,
                is_required,
                choices=None if values is None else tuple(values),
                schema=enforceable(schema, lenient=lenient, place=place),
                may_be_null="null" in kinds and (_is_free(core, rewriter) or None in (values or ())),
            )
        )
    return found


def _properties(rewriter: Rewriter) -> list[tuple[str, Place, bool]]:
    place = _resolved(rewriter, rewriter.document.root)
    if not isinstance(place.schema, Mapping):
        return []
    required, known = names(place, "required"), mapping(place, "properties")
    for key in place.schema:
        if key not in FREE and (key in rewriter.applicators or key in OF_OBJECTS):
            raise schema_error(key, place.at, WRITTEN_ONE_BY_ONE)
    if "object" not in rewriter.own_kinds(place):
        raise schema_error("type", place.at, "must be 'object' for a function's parameters")
    every = list(dict.fromkeys([*known, *required]))
    if (count(place, "minProperties") or 0) > len(required):
        raise schema_error("minProperties", place.at, WRITTEN_ONE_BY_ONE)
    most = count(place, "maxProperties")
    if most is not None and most < len(every):
        raise schema_error("maxProperties", place.at, WRITTEN_ONE_BY_ONE)
    rest = Place(True, place.base, place.at)
    if "additionalProperties" in place.schema:
        rest = rewriter.document.child(place, "additionalProperties")
    own = {name: rewriter.document.child(place, "properties", name) for name in known}
    return [(name, own.get(name, rest), name in required) for name in every]


OF_OBJECTS = frozenset({"enum", "const", "patternProperties"})


def _resolved(rewriter: Rewriter, place: Place) -> Place:
    for _ in range(MAX_REFERENCES):
        if not isinstance(place.schema, Mapping) or "$ref" not in place.schema:
            break
        if any(key in rewriter.applicators or key in ASSERTIONS for key in place.schema if key != "$ref"):
            break
        place = rewriter.document.target(place)
    return place


def _parameter(rewriter: Rewriter, name: str, place: Place, is_required: bool) -> Parameter | None:
    core = _body(rewriter, rewriter.allowed(place))
    if core is False:
        if is_required:
            raise schema_error("required", place.at, "requires a forbidden property")
        return None
    kinds = kinds_of(core, rewriter)
    values = values_of(core, rewriter)
    if values is not None and _is_plain(core):
        return Parameter(name, place.at, kinds, is_required, choices=tuple(values))
    if "string" not in kinds:
        schema = enforceable(rewriter.document.root.schema, lenient=rewriter.is_lenient, place=place)
        return Parameter(name, place.at, kinds, is_required, schema=schema)
    if _is_free(core, rewriter):
        return Parameter(name, place.at, kinds, is_required, rules=())
    if kinds == {"string"} and not isinstance(core, bool):
        rules = [_text_rule(part, place) for part in core.get("allOf", [core])]
        return Parameter(name, place.at, kinds, is_required, rules=tuple(rules))
    raise schema_error("type", place.at, TEXT_AMBIGUOUS)


def _body(rewriter: Rewriter, core: Core) -> Core:
    for _ in range(MAX_REFERENCES):
        if isinstance(core, bool) or "$ref" not in core:
            break
        core = rewriter.lookup(core["$ref"])
    return core


def _is_plain(core: Core) -> bool:
    return isinstance(core, dict) and set(core) <= {"enum", "type"} and "enum" in core


def _is_free(core: Core, rewriter: Rewriter) -> bool:
    """Return whether `core` restricts only kinds: any text is then a value of one of them."""
    if isinstance(core, bool):
        return core
    if "$ref" in core:
        return _is_free(rewriter.lookup(core["$ref"]), rewriter)
    if set(core) == {"anyOf"}:
        return all(_is_free(part, rewriter) for part in core["anyOf"])
    return set(core) <= {"type"}


def _text_rule(core: Core, place: Place) -> TextRule:
    if isinstance(core, bool) or not set(core) <= {"type", "pattern", "minLength", "maxLength"}:
        keywords = [] if isinstance(core, bool) else [key for key in core if key not in ("type", "notEnum")]
        raise schema_error(keywords[0] if keywords else "not", place.at, WRITTEN_ONE_BY_ONE)
    return TextRule(core.get("pattern"), core.get("minLength", 0), core.get("maxLength"))
