"""Rewrites `unevaluatedProperties` and `unevaluatedItems` for each alternative of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from model.text.json_schema import objects
from model.text.json_schema.complement import Complement
from model.text.json_schema.core import Core, Kinds, ProofContext, all_of, any_of, are_disjoint, type_assertion
from model.text.json_schema.document import Document, Place, mapping, schema_error, schemas

MAX_ALTERNATIVES = 64
MAX_REFERENCES = 16
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class Schemas(ProofContext, Protocol):
    """Interface of `rewriter.Rewriter`, which uses this module."""

    document: Document
    complement: Complement

    def allowed(self, place: Place, kinds: Kinds = ...) -> Core: ...
    def parts(self, place: Place, kinds: Kinds) -> list[tuple[str, Core]]: ...
    def own_kinds(self, place: Place) -> Kinds: ...
    def exclusions(self, places: list[Place], kinds: Kinds, at: Place) -> tuple[list[Core], list[Core]]: ...
    def depending(self, key: str, core: Core, kinds: Kinds) -> Core: ...


@dataclass(frozen=True)
class Alternative:
    """Alternative of a schema, with its evaluated properties and items."""

    core: Core = True
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_names: bool = False
    num_items: int = 0
    all_items: bool = False

    def and_also(self, other: Alternative, known: ProofContext) -> Alternative:
        return Alternative(
            core=all_of([self.core, other.core], known),
            names=self.names | other.names,
            patterns=self.patterns | other.patterns,
            all_names=self.all_names or other.all_names,
            num_items=max(self.num_items, other.num_items),
            all_items=self.all_items or other.all_items,
        )


class Evaluation:
    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._document = schemas.document
        self._depth = 0

    def allowed(self, place: Place, kinds: Kinds) -> Core:
        """Rewrite a schema with `unevaluatedProperties` or `unevaluatedItems`."""
        return any_of(alternative.core for alternative in self._alternatives(place, kinds))

    def _alternatives(self, place: Place, kinds: Kinds) -> list[Alternative]:
        schema = place.schema
        if isinstance(schema, bool):
            return [Alternative()] if schema else []
        if not isinstance(schema, Mapping):
            raise schema_error("schema", place.at, "must be an object or a boolean")
        if "$ref" in schema and self._document.ignores_siblings_of_refs:
            return self._target(place, "$ref", kinds)
        kinds = kinds & self._schemas.own_kinds(place)
        rest = {key: value for key, value in schema.items() if key not in IN_PLACE}
        alternatives = [self._plain(place, rest, kinds)]
        for key in schema:
            if key in IN_PLACE and key not in ("then", "else"):
                alternatives = self._product(place, alternatives, self._applied(place, key, kinds))
        return [self._closed(place, alternative, kinds) for alternative in alternatives]

    def _product(self, place: Place, alternatives: list[Alternative], others: list[Alternative]) -> list[Alternative]:
        known = self._schemas
        found = [
            alternative.and_also(other, known) for alternative in alternatives for other in others
            if not are_disjoint(alternative.core, other.core, known)
        ]  # fmt: skip
        found = [alternative for alternative in found if alternative.core is not False]
        if len(found) > MAX_ALTERNATIVES:
            raise self._refusal(place)
        return found

    def _refusal(self, place: Place) -> Exception:
        keyword = "unevaluatedItems" if "unevaluatedItems" in place.schema else "unevaluatedProperties"
        return schema_error(keyword, place.at, "cannot be enforced: too many ways to evaluate")

    def _plain(self, place: Place, rest: dict[str, Any], kinds: Kinds) -> Alternative:
        """Rewrite all keywords except in-place applicators."""
        parts = self._schemas.parts(Place(rest, place.base, place.at), kinds)
        prefix, behind = self._document.items(place)
        return Alternative(
            core=all_of((part for _, part in parts), self._schemas),
            names=frozenset(mapping(place, "properties")),
            patterns=frozenset(mapping(place, "patternProperties")),
            all_names="additionalProperties" in rest,
            num_items=len(prefix),
            all_items=behind is not None,
        )

    def _applied(self, place: Place, key: str, kinds: Kinds) -> list[Alternative]:
        document, schema = self._document, place.schema
        if key in REFERENCES:
            return self._target(place, key, kinds)
        if key == "if":
            return self._condition(place, kinds)
        if key in ("dependentSchemas", "dependencies"):
            return self._dependent(place, key, kinds)
        places = [document.child(place, key, i) for i in range(len(schemas(place, key)))]
        known, found = self._schemas, [Alternative()]
        if key == "allOf":
            for each in places:
                found = self._product(place, found, self._alternatives(each, kinds))
            return found
        if key == "oneOf":
            _, extras = self._schemas.exclusions(places, kinds, place)
            pairs = zip(places, extras, strict=True)
            return [
                alternative.and_also(Alternative(extra), known)
                for each, extra in pairs
                for alternative in self._alternatives(each, kinds)
            ]
        for each in places:  # any non-empty subset may hold
            found += self._product(place, found, self._alternatives(each, kinds))
            if len(found) > MAX_ALTERNATIVES:
                raise self._refusal(Place(schema, place.base, place.at))
        return found[1:]

    def _target(self, place: Place, key: str, kinds: Kinds) -> list[Alternative]:
        if self._depth >= MAX_REFERENCES:
            raise schema_error(key, place.at, "refers to itself")
        self._depth += 1
        try:
            return self._alternatives(self._document.target(place, key), kinds)
        finally:
            self._depth -= 1

    def _condition(self, place: Place, kinds: Kinds) -> list[Alternative]:
        document, schema = self._document, place.schema
        condition = document.child(place, "if")
        holds = self._alternatives(condition, kinds)
        if "then" in schema:
            holds = self._product(place, holds, self._alternatives(document.child(place, "then"), kinds))
        fails = [Alternative(self._schemas.complement.exactly(condition, kinds))]
        if "else" in schema:
            fails = self._product(place, fails, self._alternatives(document.child(place, "else"), kinds))
        return [*holds, *fails]

    def _dependent(self, place: Place, keyword: str, kinds: Kinds) -> list[Alternative]:
        found = [Alternative()]
        for key, value in mapping(place, keyword).items():
            absent = objects.unless_object(kinds, objects.without_property(key))
            if isinstance(value, list):
                alternatives = [
                    Alternative(self._schemas.depending(key, objects.with_properties([key, *value]), kinds))
                ]
            else:
                present = [Alternative(objects.with_properties([key]))]
                inner = self._alternatives(self._document.child(place, keyword, key), kinds)
                alternatives = [Alternative(absent), *self._product(place, present, inner)]
            found = self._product(place, found, alternatives)
        return found

    def _closed(self, place: Place, alternative: Alternative, kinds: Kinds) -> Alternative:
        schema, parts = place.schema, [alternative.core]
        types = type_assertion(kinds)
        if "unevaluatedItems" in schema and not alternative.all_items and "array" in kinds:
            if "contains" in schema or self._has_contains(place):
                raise schema_error("unevaluatedItems", place.at, "cannot be enforced together with 'contains'")
            items = self._schemas.allowed(self._document.child(place, "unevaluatedItems"))
            parts.append({**types, "prefixItems": [True] * alternative.num_items, "items": items})
        if "unevaluatedProperties" in schema and not alternative.all_names and "object" in kinds:
            others = self._schemas.allowed(self._document.child(place, "unevaluatedProperties"))
            closed: dict[str, Any] = {**types, "properties": dict.fromkeys(sorted(alternative.names), True)}
            if alternative.patterns:
                closed["patternProperties"] = dict.fromkeys(sorted(alternative.patterns), True)
            parts.append({**closed, "additionalProperties": others})
        return Alternative(
            core=all_of(parts, self._schemas),
            names=alternative.names,
            patterns=alternative.patterns,
            all_names=alternative.all_names or "unevaluatedProperties" in schema,
            num_items=alternative.num_items,
            all_items=alternative.all_items or "unevaluatedItems" in schema,
        )

    def _has_contains(self, place: Place) -> bool:
        stack, seen = [place], 0
        while stack:
            found, seen = stack.pop(), seen + 1
            if not isinstance(found.schema, Mapping):
                continue
            if "contains" in found.schema or seen > 1000:
                return True
            for key in REFERENCES:
                if key in found.schema:
                    stack.append(self._document.target(found, key))
            stack += [
                self._document.child(found, key, step)
                for key in ("allOf", "anyOf", "oneOf", "dependentSchemas")
                for step in _steps(found.schema.get(key))
            ]
            stack += [self._document.child(found, key) for key in ("if", "then", "else") if key in found.schema]
        return False


IN_PLACE = frozenset({
    *REFERENCES, "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies",
})  # fmt: skip
"""Keywords that apply schemas to the value itself: in-place applicators."""


def _steps(value: Any) -> list[Any]:
    if isinstance(value, list):
        return list(range(len(value)))
    return list(value) if isinstance(value, Mapping) else []
