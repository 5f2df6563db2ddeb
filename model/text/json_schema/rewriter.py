"""Rewrites a JSON schema to core schemas that never allow more; refuses unenforceable keywords."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from model.errors import GrammarError
from model.text.json_schema import arrays, objects, texts
from model.text.json_schema.complement import Complement
from model.text.json_schema.core import (
    ALL,
    NUMBERS,
    OBJECT,
    STRING,
    Core,
    Kinds,
    all_of,
    any_of,
    are_disjoint,
    canonical_key,
    kind_of,
    kinds_of,
    kinds_of_type,
    names_in,
    of_kinds,
    plain_values,
    requiring,
    type_assertion,
)
from model.text.json_schema.document import (
    CONTROLS,
    Document,
    Place,
    count,
    is_exact,
    mapping,
    name_lists,
    names,
    number,
    pattern,
    schema_error,
    schemas,
)
from model.text.json_schema.evaluation import Evaluation

MAX_NODES = 100_000
"""Max core schemas created from one schema."""
MAX_PRODUCED_AHEAD = 8
"""Max nested references that a proof resolves early."""
MAX_OPTIONS = 24
"""Max product of the ways in which schemas of a `oneOf` differ."""
MAX_QUESTIONS = 200
"""Max queries to llguidance, about 1 ms each."""

FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
ASSERTIONS = frozenset({
    "type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength", "pattern", "format", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "properties",
    "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
})  # fmt: skip


class Rewriter:
    def __init__(self, document: Document, *, lenient: bool, formats: Collection[str] = FORMATS) -> None:
        """Refuse formats outside `formats`, unless `lenient`."""
        self.document = document
        self._formats = formats
        self.is_lenient = lenient
        self._bodies: dict[str, Core | None] = {}
        self._places: dict[str, tuple[Place, str]] = {}
        self._whole: set[str] = set()
        self._keys: dict[tuple[str, str], str] = {}
        self._num_nodes = self._num_ahead = self._num_questions = 0
        self.complement = Complement(self)
        self._evaluation = Evaluation(self)
        self.applicators: Mapping[str, Callable[[Place, Kinds], Core]] = {
            "$ref": lambda place, _: self.reference(place, "$ref"),
            "$dynamicRef": lambda place, _: self.reference(place, "$dynamicRef"),
            "$recursiveRef": lambda place, _: self.reference(place, "$recursiveRef"),
            "allOf": lambda place, kinds: all_of(self.branches(place, "allOf", kinds), self),
            "anyOf": lambda place, kinds: any_of(self.branches(place, "anyOf", kinds)),
            "oneOf": self._one_of,
            "not": lambda place, kinds: self.complement.exactly(self.document.child(place, "not"), kinds),
            "if": self._condition,
            "dependentRequired": self._dependent_required,
            "dependentSchemas": self._dependent_schemas,
            "dependencies": self._dependencies,
            "propertyNames": self._property_names,
            "contains": self._contains,
            "uniqueItems": self._unique_items,
        }

    def rewrite(self, place: Place | None = None) -> tuple[Core, dict[str, Core]]:
        """Return the rewritten schema, or its part at `place`, and the bodies of its references."""
        root = self.allowed(self.document.root if place is None else place)
        while waiting := [key for key in self._places if key not in self._bodies]:
            for key in waiting:
                self.lookup(key)
        return root, {key: body for key, body in self._bodies.items() if body is not None}

    def spend(self, num_nodes: int = 1) -> None:
        """Raise GrammarError beyond MAX_NODES core schemas."""
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise GrammarError("The JSON schema is too complex: its keywords multiply each other.")

    def allowed(self, place: Place, kinds: Kinds = ALL) -> Core:
        """Return the core schema of `place` for values of `kinds`."""
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise schema_error("schema", place.at, "must be an object or a boolean")
        self.spend()
        if "$ref" in schema and self.document.ignores_siblings_of_refs:
            return self.reference(place, "$ref")
        kinds = kinds & self.own_kinds(place)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            return self._evaluation.allowed(place, kinds)
        return all_of((part for _, part in self.parts(place, kinds)), self)

    def parts(self, place: Place, kinds: Kinds) -> list[tuple[str, Core]]:
        """Return each keyword's core schema, in order; all assertions share one."""
        found: list[tuple[str, Core]] = []
        for key in place.schema:
            if key in ASSERTIONS:
                if not found or all(name for name, _ in found):
                    found.append(("", self._assertions(place, kinds)))
            elif key in self.applicators:
                found.append((key, self.applicators[key](place, kinds)))
        return found

    def branches(self, place: Place, keyword: str, kinds: Kinds) -> list[Core]:
        return [
            self.allowed(self.document.child(place, keyword, i), kinds) for i in range(len(schemas(place, keyword)))
        ]

    def own_kinds(self, place: Place) -> Kinds:
        schema, kinds = place.schema, ALL
        if "type" in schema:
            types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            if not isinstance(types, list) or not all(isinstance(name, str) and name in TYPES for name in types):
                raise schema_error("type", place.at, f"must be among {', '.join(sorted(TYPES))}")
            kinds = frozenset().union(*map(kinds_of_type, types))
        for values in self.values(place):
            held = frozenset(map(kind_of, values))
            kinds &= held | NUMBERS if held & NUMBERS else held
        return kinds

    def values(self, place: Place) -> list[Sequence[Any]]:
        found = [schemas(place, "enum")] if "enum" in place.schema else []
        found += [[place.schema["const"]]] if "const" in place.schema else []
        for values in found:
            self.spend(len(values) // 4)
            stack = list(values)
            while stack:
                value = stack.pop()
                stack += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
                keyword = "enum" if "enum" in place.schema else "const"
                if isinstance(value, int | float) and not is_exact(value):
                    raise schema_error(keyword, place.at, "has a number that is not an exact double")
                if isinstance(value, str) and CONTROLS.search(value):
                    raise schema_error(keyword, place.at, "cannot be enforced: it holds a control character")
        return found

    def shared(self, place: Place, mode: str = "allowed") -> Core:
        """Return a reference to what a schema allows or forbids; each is rewritten once."""
        if isinstance(place.schema, bool):
            return place.schema is (mode == "allowed")
        key = self._keys.setdefault((place.at, mode), f"s{len(self._keys)}")
        self._places.setdefault(key, (place, mode))
        return {"$ref": key}

    def knows_format(self, name: Any) -> bool:
        return name in self._formats or not self.is_lenient

    def lookup(self, key: str) -> Core:
        """Return the body of a reference; True inside itself or beyond MAX_PRODUCED_AHEAD."""
        if key not in self._bodies:
            if self._num_ahead >= MAX_PRODUCED_AHEAD:
                return True
            self._bodies[key] = None
            self._num_ahead += 1
            place, mode = self._places[key]
            if mode == "allowed":
                self._bodies[key] = self.allowed(place)
            elif mode == "forbidden":
                self._bodies[key], is_whole = self.complement.nearly(place, ALL)
                self._whole |= {key} if is_whole else set()
            else:
                self._bodies[key] = self.complement.exactly(place, ALL)
            self._num_ahead -= 1
        body = self._bodies[key]
        return True if body is None else body

    def is_whole(self, key: str) -> bool:
        """Return whether a reference covers all that its schema forbids."""
        return key in self._whole

    def no_text_fits(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return whether provably no text matches both; answers at most MAX_QUESTIONS."""
        if not texts.must_be_asked(one, other) or self._num_questions >= MAX_QUESTIONS:
            return False
        self._num_questions += 1
        return texts.no_text_fits(one, other)

    def reference(self, place: Place, keyword: str) -> Core:
        return self.shared(self.document.target(place, keyword))

    def exclusions(self, places: list[Place], kinds: Kinds, at: Place) -> tuple[list[Core], list[Core]]:
        """Return each `oneOf` schema's core, and the rule that separates it from the others."""
        cores = [self.allowed(each, kinds) for each in places]
        values = [canonical_key(value) for core in cores for value in plain_values(core)]
        if all(map(plain_values, cores)) and len(set(values)) == len(values):
            return cores, [True] * len(cores)
        needed = [requiring(core, names(at, "required"), self) for core in cores]
        extras: list[Core] = []
        for i, core in enumerate(cores):
            self.spend(1 + len(cores) // 4)
            others = [j for j in range(len(cores)) if j != i and not are_disjoint(needed[i], needed[j], self)]
            most = max(1, int((MAX_OPTIONS / len(cores)) ** (1 / max(1, len(others)))))
            extras.append(all_of([self._apart(core, cores[j], places[j], at, most) for j in others], self))
        return cores, extras

    def _apart(self, core: Core, other: Core, place: Place, at: Place, most: int) -> Core:
        """Return the part of `core` outside `other`, the schema at `place`."""
        mine = kinds_of(core, self)
        common = mine & kinds_of(other, self)
        rest = mine - common
        found, is_exact = self.complement.nearly(place, common, frozenset(names_in(core, self)))
        is_exact = is_exact and ("integer" in rest or "fraction" not in rest)
        options = found["anyOf"] if isinstance(found, dict) and "anyOf" in found else [found]
        options = [option for option in options if not are_disjoint(option, core, self)][:most]
        apart = any_of([of_kinds(rest if "integer" in rest else rest - NUMBERS), *options])
        if apart is False and not is_exact:
            raise schema_error("oneOf", at.at, "cannot be enforced: its schemas overlap")
        return apart

    def _one_of(self, place: Place, kinds: Kinds) -> Core:
        places = [self.document.child(place, "oneOf", i) for i in range(len(schemas(place, "oneOf")))]
        cores, extras = self.exclusions(places, kinds, place)
        return any_of(all_of(pair, self) for pair in zip(cores, extras, strict=True))

    def _condition(self, place: Place, kinds: Kinds) -> Core:
        condition = self.document.child(place, "if")
        then, other = (
            self.allowed(self.document.child(place, key), kinds) if key in place.schema else True
            for key in ("then", "else")
        )
        if then is True and other is True:
            return True
        return any_of([
            all_of([self.allowed(condition, kinds), then], self),
            all_of([self.complement.exactly(condition, kinds), other], self),
        ])  # fmt: skip

    def _dependent_required(self, place: Place, kinds: Kinds) -> Core:
        rules = name_lists(place, "dependentRequired")
        return all_of([self.depending(key, objects.with_properties([key, *rules[key]]), kinds) for key in rules])

    def _dependent_schemas(self, place: Place, kinds: Kinds) -> Core:
        rules = mapping(place, "dependentSchemas")
        parts = [self.depending(key, self._if_present(place, "dependentSchemas", key, kinds), kinds) for key in rules]
        return all_of(parts, self)

    def _dependencies(self, place: Place, kinds: Kinds) -> Core:
        parts = []
        for key, value in mapping(place, "dependencies").items():
            if isinstance(value, list) and all(isinstance(name, str) for name in value):
                core = objects.with_properties([key, *value])
            else:
                core = self._if_present(place, "dependencies", key, kinds)
            parts.append(self.depending(key, core, kinds))
        return all_of(parts, self)

    def _if_present(self, place: Place, keyword: str, key: str, kinds: Kinds) -> Core:
        rule = self.allowed(self.document.child(place, keyword, key), kinds & OBJECT)
        return all_of([objects.with_properties([key]), rule], self)

    def depending(self, key: str, core: Core, kinds: Kinds) -> Core:
        """Return `core`, applied only to objects with the property `key`."""
        if "object" not in kinds:
            return True
        return objects.unless_object(kinds, any_of([objects.without_property(key), core]))

    def _property_names(self, place: Place, kinds: Kinds) -> Core:
        if "object" not in kinds:
            return True
        core = objects.named(self.allowed(self.document.child(place, "propertyNames"), STRING), self)
        if core is None:
            raise schema_error("propertyNames", place.at, "cannot be enforced")
        return True if core is True else objects.unless_object(kinds, core)

    def _contains(self, place: Place, kinds: Kinds) -> Core:
        least, most = count(place, "minContains"), count(place, "maxContains")
        least = 1 if least is None else least
        if "array" not in kinds or (least == 0 and most is None):
            return True
        child = self.document.child(place, "contains")
        other = True if most is None else self._other_items(child)
        core = arrays.containing(self.shared(child), other, least, most, count(place, "maxItems"))
        if core is None:
            raise schema_error("contains", place.at, "cannot be enforced with this many items")
        self.spend(4)
        return arrays.unless_array(kinds, core)

    def _orders_items(self, core: dict[str, Any]) -> bool:
        return arrays.writes_items(core, self) and arrays.without_repeats(core, self) not in (None, True)

    def _other_items(self, place: Place) -> Core:
        other = self.shared(place, "forbidden")
        if not isinstance(other, bool) and self.lookup(other["$ref"]) is False:
            raise schema_error("maxContains", place.at, "cannot be enforced")
        return other

    def _unique_items(self, place: Place, kinds: Kinds) -> Core:
        if not isinstance(place.schema["uniqueItems"], bool):
            raise schema_error("uniqueItems", place.at, "must be a boolean")
        if "array" not in kinds or not place.schema["uniqueItems"]:
            return True
        core = arrays.without_repeats(self._array(place), self)
        if core is None:
            raise schema_error("uniqueItems", place.at, "cannot be enforced here (it can for few values, or one item)")
        self.spend(len(core["anyOf"]) if isinstance(core, dict) and "anyOf" in core else 1)
        return core if core is True else arrays.unless_array(kinds, core)

    def _assertions(self, place: Place, kinds: Kinds) -> Core:
        """Return the core schema of the assertion keywords."""
        if not kinds:
            return False
        core: dict[str, Any] = type_assertion(kinds)
        parts: list[Core] = [{**core, "enum": values} for values in self.values(place)]
        if kinds & NUMBERS:
            core |= self._number(place)
        if "string" in kinds:
            core |= self._string(place)
        if "array" in kinds:
            core |= self._array(place)
            if place.schema.get("uniqueItems") is True and self._orders_items(core):
                del core["items"]
        if "object" in kinds:
            core |= self._object(place)
            least, most = count(place, "minProperties"), count(place, "maxProperties")
            if least or most is not None:
                sized = objects.sized(core, least or 0, most)
                if sized is None:
                    raise schema_error(
                        "minProperties" if least else "maxProperties", place.at, "cannot be enforced here"
                    )
                self.spend(len(sized["anyOf"]) if isinstance(sized, dict) and "anyOf" in sized else 1)
                return all_of([*parts, sized if kinds == OBJECT else self._mixed(core, sized, kinds)])
        if parts and set(core) <= {"type"}:
            return all_of(parts)
        return all_of([core, *parts])

    def _mixed(self, core: dict[str, Any], sized: Core, kinds: Kinds) -> Core:
        own = ("properties", "patternProperties", "additionalProperties", "required")
        rest = {key: value for key, value in core.items() if key not in own}
        as_object = all_of([{"type": "object"}, sized])
        return any_of([{**rest, **type_assertion(kinds - OBJECT)}, as_object])

    def _number(self, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, open_key in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            value = number(place, key, rounds=True)
            if isinstance(place.schema.get(open_key), bool):  # draft 4
                if value is not None:
                    found[open_key if place.schema[open_key] else key] = value
                continue
            if value is not None:
                found[key] = value
            if (open_value := number(place, open_key, rounds=True)) is not None:
                found[open_key] = open_value
        multiple = number(place, "multipleOf")
        if multiple is not None:
            if multiple <= 0:
                raise schema_error("multipleOf", place.at, "must be above 0")
            found["multipleOf"] = multiple
        return found

    def _string(self, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in ("minLength", "maxLength"):
            if (value := count(place, key)) is not None:
                found[key] = value
        if "pattern" in place.schema:
            found["pattern"] = pattern(place.schema["pattern"], "pattern", place.at)
        if "format" in place.schema:
            if not isinstance(place.schema["format"], str):
                raise schema_error("format", place.at, "must be a string")
            found["format"] = place.schema["format"]
        if "format" in found and found["format"] not in self._formats:
            if not self.is_lenient:
                raise schema_error("format", place.at, f"must be one of {', '.join(sorted(FORMATS))}")
            del found["format"]
        return found

    def _array(self, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in ("minItems", "maxItems"):
            if (value := count(place, key)) is not None:
                found[key] = value
        prefix, rest = self.document.items(place)
        if prefix:
            found["prefixItems"] = [self.allowed(item) for item in prefix]
        if rest is not None:
            found["items"] = self.allowed(rest)
        return found

    def _object(self, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in ("properties", "patternProperties"):
            if key in place.schema:
                found[key] = {name: self.allowed(self.document.child(place, key, name)) for name in mapping(place, key)}
        if "additionalProperties" in place.schema:
            found["additionalProperties"] = self.allowed(self.document.child(place, "additionalProperties"))
        if "required" in place.schema:
            found["required"] = names(place, "required")
        return found
