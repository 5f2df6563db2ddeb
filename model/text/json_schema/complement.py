"""Complements of schemas as core schemas, for `not`, `else` and `oneOf`.

Some complements, such as a pattern's, have no grammar: `exactly` refuses them, `nearly` omits them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, Protocol

from model.text.json_schema import objects
from model.text.json_schema.core import (
    NUMBERS,
    OBJECT,
    Core,
    Kinds,
    ProofContext,
    all_of,
    any_of,
    are_disjoint,
    canonical_key,
    kind_of,
    of_kinds,
    type_assertion,
)
from model.text.json_schema.document import Document, Place, count, mapping, name_lists, names, number, schema_error

MAX_PAIRS = 64
"""Max pairs of schemas in a forbidden `oneOf`."""
MAX_VALUES = 64
"""Max values of a forbidden `enum`."""


class Schemas(ProofContext, Protocol):
    """Interface of `rewriter.Rewriter`, which uses this module."""

    document: Document

    def allowed(self, place: Place, kinds: Kinds = ...) -> Core: ...
    def branches(self, place: Place, keyword: str, kinds: Kinds) -> list[Core]: ...
    def own_kinds(self, place: Place) -> Kinds: ...
    def values(self, place: Place) -> Sequence[Sequence[Any]]: ...
    def shared(self, place: Place, mode: str = ...) -> Core: ...
    def knows_format(self, name: Any) -> bool: ...
    def is_whole(self, key: str) -> bool: ...
    def spend(self, num_nodes: int = ...) -> None: ...


@dataclass(frozen=True)
class _Task:
    place: Place
    kinds: Kinds
    is_exact: bool
    names: frozenset[str]  # properties that the values may have
    missed: list[str] = field(default_factory=list)  # keywords with an incomplete complement

    def at(self, place: Place) -> _Task:
        return replace(self, place=place)

    @property
    def mode(self) -> str:
        return "forbidden exactly" if self.is_exact else "forbidden"


class Complement:
    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._document = schemas.document
        self._rules: Mapping[str, Callable[[_Task], Core]] = {
            "required": self._required,
            "$ref": lambda task: self._reference(task, "$ref"),
            "$dynamicRef": lambda task: self._reference(task, "$dynamicRef"),
            "$recursiveRef": lambda task: self._reference(task, "$recursiveRef"),
            "not": lambda task: schemas.allowed(self._document.child(task.place, "not"), task.kinds),
            "allOf": lambda task: any_of(self._branches(task, "allOf")),
            "anyOf": lambda task: all_of(self._branches(task, "anyOf"), schemas),
            "oneOf": self._one_of,
            "if": self._condition,
            "properties": self._properties,
            "additionalProperties": self._additional_properties,
            "dependentRequired": self._dependent_required,
            "dependentSchemas": self._dependent_schemas,
            "dependencies": self._dependencies,
            "contains": self._contains,
            "prefixItems": self._items,
            "items": self._items,
            "uniqueItems": lambda task: self._missing(task, "uniqueItems", "array", task.place.schema["uniqueItems"]),
            "format": self._format,
            **{key: partial(self._bound, keyword=key) for key in BOUNDS},
            **{key: partial(self._missing, keyword=key, kind=kind) for key, kind in MISSING.items()},
        }

    def exactly(self, place: Place, kinds: Kinds) -> Core:
        """Return the complement of `place` within `kinds`. Raises GrammarError without a grammar."""
        return self._forbidden(_Task(place, kinds | NUMBERS if "fraction" in kinds else kinds, True, frozenset()))

    def nearly(self, place: Place, kinds: Kinds, names: frozenset[str] = frozenset()) -> tuple[Core, bool]:
        """Return the complement of `place` for values that may have `names`, and whether it is complete."""
        task = _Task(place, kinds | NUMBERS if "fraction" in kinds else kinds, False, names)
        core = self._forbidden(task)
        return core, not task.missed

    def _forbidden(self, task: _Task) -> Core:
        schema = task.place.schema
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping):
            raise schema_error("schema", task.place.at, "must be an object or a boolean")
        self._schemas.spend()
        if "$ref" in schema and self._document.ignores_siblings_of_refs:
            return self._reference(task, "$ref")
        own = self._schemas.own_kinds(task.place)
        others = task.kinds - own
        if "fraction" in others and "integer" not in others:
            others -= NUMBERS
            self._missing(task, "type", "fraction")
        parts = [of_kinds(others)]
        task = replace(task, kinds=task.kinds & own)
        parts += [self._other_values(task, values) for values in self._schemas.values(task.place)]
        parts += [rule(task) for key, rule in self._rules.items() if key in schema]
        return any_of(parts)

    def _missing(self, task: _Task, keyword: str, kind: str, matters: bool = True) -> Core:
        if matters and kind in task.kinds:
            if task.is_exact:
                raise schema_error(keyword, task.place.at, "cannot be enforced under 'not' or 'if'")
            task.missed.append(keyword)
        return False

    def _reference(self, task: _Task, keyword: str) -> Core:
        return self._shared(task, self._document.target(task.place, keyword))

    def _child(self, task: _Task, *steps: str | int) -> Core:
        return self._forbidden(task.at(self._document.child(task.place, *steps)))

    def _shared(self, task: _Task, place: Place) -> Core:
        """Return the complement of a schema elsewhere or of a nested value."""
        if isinstance(place.schema, bool):
            return not place.schema
        found = self._schemas.shared(place, task.mode)
        if task.is_exact or isinstance(found, bool):
            return found
        body = self._schemas.lookup(found["$ref"])
        if not self._schemas.is_whole(found["$ref"]):
            task.missed.append("$ref")
        return False if body is False else found

    def _branches(self, task: _Task, keyword: str) -> list[Core]:
        return [self._child(task, keyword, i) for i in range(len(task.place.schema[keyword]))]

    def _one_of(self, task: _Task) -> Core:
        cores = self._schemas.branches(task.place, "oneOf", task.kinds)
        known = self._schemas
        pairs = [pair for pair in combinations(cores, 2) if not are_disjoint(*pair, known)]
        if len(pairs) > MAX_PAIRS:
            pairs = []
            self._missing(task, "oneOf", next(iter(task.kinds), ""))
        none = all_of(self._branches(task, "oneOf"), known)
        return any_of([none, *(all_of(pair, known) for pair in pairs)])

    def _condition(self, task: _Task) -> Core:
        known = self._schemas
        then, other = (self._child(task, key) if key in task.place.schema else False for key in ("then", "else"))
        holds: Core = False
        if then is not False:
            holds = self._schemas.allowed(self._document.child(task.place, "if"), task.kinds)
        fails = False if other is False else self._child(task, "if")
        return any_of([all_of([holds, then], known), all_of([fails, other], known)])

    def _required(self, task: _Task) -> Core:
        if "object" not in task.kinds:
            return False
        return any_of(objects.without_property(name) for name in names(task.place, "required"))

    def _properties(self, task: _Task) -> Core:
        if "object" not in task.kinds:
            return False
        found = []
        for name in mapping(task.place, "properties"):
            value = self._shared(task, self._document.child(task.place, "properties", name))
            if value is not False:
                found.append({"type": "object", "properties": {name: value}, "required": [name]})
        return any_of(found)

    def _additional_properties(self, task: _Task) -> Core:
        schema = task.place.schema["additionalProperties"]
        if schema is True or schema == {} or "object" not in task.kinds:
            return False
        self._missing(task, "additionalProperties", "object")
        if "patternProperties" in task.place.schema:
            return False
        value = self._shared(task, self._document.child(task.place, "additionalProperties"))
        others = sorted(task.names - set(mapping(task.place, "properties")))
        return any_of({"type": "object", "properties": {name: value}, "required": [name]} for name in others if value)

    def _dependent_required(self, task: _Task) -> Core:
        if "object" not in task.kinds:
            return False
        rules = name_lists(task.place, "dependentRequired")
        return any_of(self._lacking(key, name) for key, others in rules.items() for name in others)

    def _dependent_schemas(self, task: _Task) -> Core:
        if "object" not in task.kinds:
            return False
        return any_of(
            all_of([objects.with_properties([key]), self._child(task, "dependentSchemas", key)])
            for key in mapping(task.place, "dependentSchemas")
        )

    def _dependencies(self, task: _Task) -> Core:
        if "object" not in task.kinds:
            return False
        found: list[Core] = []
        for key, value in mapping(task.place, "dependencies").items():
            if isinstance(value, list):
                found += [self._lacking(key, name) for name in value]
            else:
                found.append(all_of([objects.with_properties([key]), self._child(task, "dependencies", key)]))
        return any_of(found)

    def _lacking(self, key: str, name: str) -> Core:
        return all_of([objects.with_properties([key]), objects.without_property(name)]) if key != name else False

    def _contains(self, task: _Task) -> Core:
        place = task.place
        least, most = count(place, "minContains"), count(place, "maxContains")
        least = 1 if least is None else least
        if "array" not in task.kinds:
            return False
        child = self._document.child(place, "contains")
        if most is not None:
            return self._missing(task, "maxContains", "array")
        if least == 1:
            other = self._shared(task, child)
            return {"type": "array", "items": other}
        return False if least == 0 else self._missing(task, "minContains", "array")

    def _items(self, task: _Task) -> Core:
        if "array" not in task.kinds:
            return False
        prefix, rest = self._document.items(task.place)
        found = [self._item(i, self._shared(task, place)) for i, place in enumerate(prefix)]
        if rest is not None:
            value = self._shared(task, rest)
            if value is not False and value is not True:
                self._missing(task, "items", "array")
            found.append(self._item(len(prefix), value))
        return any_of(found)

    def _item(self, index: int, value: Core) -> Core:
        if value is False:
            return False
        return {"type": "array", "prefixItems": [True] * index + [value], "minItems": index + 1}

    def _format(self, task: _Task) -> Core:
        return self._missing(task, "format", "string", self._schemas.knows_format(task.place.schema["format"]))

    def _bound(self, task: _Task, keyword: str) -> Core:
        kinds, opposite, step = BOUNDS[keyword]
        if not kinds & task.kinds:
            return False
        if step == 0:
            return self._number_bound(task, keyword, opposite)
        value = (count(task.place, keyword) or 0) + step
        if value < 0:
            return False
        core: dict[str, Any] = {"type": next(iter(kinds)), opposite: value}
        if (keyword == "maxProperties" and value > 1) or (keyword == "minProperties" and value < 0):
            return self._missing(task, keyword, "object")
        return core

    def _number_bound(self, task: _Task, keyword: str, opposite: str) -> Core:
        value = task.place.schema[keyword]
        if isinstance(value, bool):  # draft 4: a flag that the bound itself handles
            return False
        value = number(task.place, keyword)
        if task.place.schema.get(f"exclusive{keyword[0].upper()}{keyword[1:]}") is True:
            opposite = {"exclusiveMaximum": "maximum", "exclusiveMinimum": "minimum"}[opposite]
        return {**type_assertion(task.kinds & NUMBERS), opposite: value}

    def _other_values(self, task: _Task, values: Sequence[Any]) -> Core:
        found: list[Core] = []
        for kind in sorted(task.kinds & {"null", "boolean", "string"}):
            own = [value for value in values if kind_of(value) == kind]
            found.append(_other_plain(kind, own))
        numbers = sorted({canonical_key(value): value for value in values if kind_of(value) in NUMBERS}.values())
        others = [value for value in values if isinstance(value, list | Mapping)]
        if len(numbers) + len(others) > MAX_VALUES:
            return any_of(found) if not self._missing(task, "enum", next(iter(task.kinds))) else False
        if task.kinds & NUMBERS:
            found += _between(type_assertion(task.kinds & NUMBERS), numbers)
        if "array" in task.kinds:
            lists = [value for value in others if isinstance(value, list)]
            found.append(all_of([{"type": "array"}, *map(_other_array, lists)], self._schemas))
        if "object" in task.kinds:
            found.append(self._other_objects(task, [value for value in others if isinstance(value, Mapping)]))
        return any_of(found)

    def _other_objects(self, task: _Task, values: Sequence[Mapping[str, Any]]) -> Core:
        parts: list[Core] = [{"type": "object"}]
        for value in values:
            options = [objects.without_property(name) for name in value]
            options += [
                {"type": "object", "required": [name], "properties": {name: _other_value(item)}}
                for name, item in value.items()
            ]
            if value:
                self._missing(task, "enum" if "enum" in task.place.schema else "const", "object")
                options += [objects.with_properties([name]) for name in sorted(task.names - set(value))]
            else:
                options = [{"type": "object", "minProperties": 1}]
            parts.append(any_of(options))
        return all_of(parts, self._schemas)


BOUNDS: Mapping[str, tuple[Kinds, str, int]] = {
    "minLength": (frozenset({"string"}), "maxLength", -1),
    "maxLength": (frozenset({"string"}), "minLength", 1),
    "minItems": (frozenset({"array"}), "maxItems", -1),
    "maxItems": (frozenset({"array"}), "minItems", 1),
    "minProperties": (OBJECT, "maxProperties", -1),
    "maxProperties": (OBJECT, "minProperties", 1),
    "minimum": (NUMBERS, "exclusiveMaximum", 0),
    "maximum": (NUMBERS, "exclusiveMinimum", 0),
    "exclusiveMinimum": (NUMBERS, "maximum", 0),
    "exclusiveMaximum": (NUMBERS, "minimum", 0),
}
"""Kinds, opposite bound and its offset."""
MISSING: Mapping[str, str] = {
    "pattern": "string",
    "multipleOf": "integer",
    "patternProperties": "object",
    "propertyNames": "object",
    "unevaluatedProperties": "object",
    "unevaluatedItems": "array",
}
"""Keywords whose complement has no grammar, with their kinds."""


def _other_plain(kind: str, values: Sequence[Any]) -> Core:
    if kind == "null":
        return False if values else {"type": "null"}
    if kind == "boolean":
        rest = [value for value in (True, False) if value not in values]
        return {"enum": rest} if rest else False
    return {"type": "string", "notEnum": list(values)} if values else {"type": "string"}


def _between(core: dict[str, Any], values: Sequence[int | float]) -> list[Core]:
    if not values:
        return [core]
    found: list[Core] = [{**core, "exclusiveMaximum": values[0]}]
    found += [{**core, "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(values)]
    return [*found, {**core, "exclusiveMinimum": values[-1]}]


def _other_value(value: Any) -> Core:
    """Return the complement of `value`; objects only if they lack one of its properties."""
    kind = kind_of(value)
    kinds = NUMBERS if kind in NUMBERS else frozenset({kind})
    rest = of_kinds(frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"}) - kinds)
    if kinds == NUMBERS:
        return any_of([rest, *_between({"type": "number"}, [value])])
    if kind == "array":
        return any_of([rest, _other_array(value)])
    if kind == "object":
        return any_of([rest, *(objects.without_property(name) for name in value)])
    return any_of([rest, _other_plain(kind, [value])])


def _other_array(value: list[Any]) -> Core:
    size = len(value)
    options: list[Core] = [{"type": "array", "maxItems": size - 1}] if size else []
    options.append({"type": "array", "minItems": size + 1})
    options += [
        {"type": "array", "prefixItems": [True] * i + [_other_value(item)], "minItems": i + 1}
        for i, item in enumerate(value)
    ]
    return any_of(options)
