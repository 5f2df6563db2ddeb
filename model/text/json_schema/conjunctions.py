"""Merges conjunctions of core schemas.

llguidance merges them too, but not in reference cycles, and it keeps contradictory alternatives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from model.text.json_schema import texts
from model.text.json_schema.core import (
    MAX_DEPTH,
    NO_CONTEXT,
    NUMBERS,
    Core,
    Exclusions,
    any_of,
    canonical_key,
    has_no_number,
    is_excluded,
    kind_of,
    kinds_of,
    of_kinds,
)

MAX_ALTERNATIVES = 256
OWN = "c"
"""Key prefix of conjunctions."""
MAX_ROUNDS = 32
SIZES = (
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)
LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
ALIKE = ("pattern", "format", "multipleOf")
"""Keywords that one assertion cannot have twice."""


PAIRS_PER_UNIT = 64
"""Assertion pairs compared per budget unit."""


class _TooLarge(Exception):
    """The conjunction is left to llguidance."""


class Conjunctions:
    def __init__(self, bodies: Mapping[str, Core], spend: Callable[[int], None]) -> None:
        self._bodies = dict(bodies)
        self._done: dict[str, Core] = {}
        self._keys: dict[str, str] = {}
        self._spend = spend

    def lookup(self, key: str) -> Core:
        return self._bodies[key]

    def no_text_fits(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return False: patterns were compared while rewriting."""
        return False

    def merge_all(self, root: Core) -> tuple[Core, dict[str, Core]]:
        """Return the merged `root` and all schemas it references."""
        found = self._simple(root)
        waiting = _keys_in(found)
        while waiting:
            key = waiting.pop()
            if key not in self._done:
                self._done[key] = self._simple(self._bodies[key])
                waiting += _keys_in(self._done[key])
        return self._without_empty(found)

    def _without_empty(self, root: Core) -> tuple[Core, dict[str, Core]]:
        """Replace references to empty schemas by False: llguidance rejects empty definitions."""
        empty = {key for key, core in self._done.items() if core is False}
        for _ in range(MAX_ROUNDS):
            self._spend(len(self._done) if empty else 0)
            more = {key for key, core in self._done.items() if key not in empty and _without(core, empty) is False}
            if not empty or not more:
                break
            empty |= more
        if not empty:
            return root, self._done
        kept = {key: _without(core, empty) for key, core in self._done.items() if key not in empty}
        return _without(root, empty), kept

    def _simple(self, core: Core) -> Core:
        if isinstance(core, bool) or "$ref" in core:
            return core
        self._spend(1)
        if "anyOf" in core:
            return any_of(self._simple(part) for part in core["anyOf"])
        if "allOf" not in core:
            return self._with_simple_parts(core)
        try:
            return any_of(self._merged(parts) for parts in self._alternatives(core, 0))
        except _TooLarge:
            return {"allOf": [self._simple(part) for part in core["allOf"]]}

    def _with_simple_parts(self, core: dict[str, Any]) -> Core:
        found = dict(core)
        for key in ("properties", "patternProperties"):
            if key in core:
                found[key] = {name: self._simple(part) for name, part in core[key].items()}
        for key in ("items", "additionalProperties"):
            if key in core:
                found[key] = self._simple(core[key])
        if "prefixItems" in core:
            found["prefixItems"] = [self._simple(part) for part in core["prefixItems"]]
        patterns = {json.dumps(part): pattern for pattern, part in found.get("patternProperties", {}).items()}
        for name, part in found.get("properties", {}).items():
            pattern = patterns.get(json.dumps(part))
            if pattern is not None and texts.matches(pattern, name):
                found["properties"][name] = True  # the pattern implies it
        return _without_empty_kinds(found)

    def _alternatives(self, core: Core, depth: int) -> list[list[dict[str, Any]]]:
        """Return the alternatives of `core`, each as assertions that hold together."""
        if isinstance(core, bool):
            return [[]] if core else []
        if depth > MAX_DEPTH:
            raise _TooLarge
        if "$ref" in core:
            return self._alternatives(self._bodies[core["$ref"]], depth + 1)
        if "anyOf" in core:
            found = [parts for option in core["anyOf"] for parts in self._alternatives(option, depth + 1)]
            if len(found) > MAX_ALTERNATIVES:
                raise _TooLarge
            return found
        if "allOf" not in core:
            return [[core]]
        combined: list[list[dict[str, Any]]] = [[]]
        exclusions = Exclusions(core["allOf"], self)
        for part in core["allOf"]:
            options = self._alternatives(part, depth + 1)
            self._spend(len(combined) * len(options) // 16)
            self._spend(sum(map(len, combined)) * sum(map(len, options)) // PAIRS_PER_UNIT)
            pairs = ((one, other) for one in combined for other in options)
            combined = [_joined(*pair) for pair in pairs if not exclusions.any_between(*pair)]
            if len(combined) > MAX_ALTERNATIVES:
                raise _TooLarge
        return combined

    def _merged(self, parts: list[dict[str, Any]]) -> Core:
        found: dict[str, Any] = {}
        for part in parts:
            self._spend(1 + len(part.get("properties", ())))
            merged = self._pair(found, part)
            if merged is False:
                return False
            found = merged
        return self._with_simple_parts(found)

    def _pair(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | Literal[False]:
        if not one or not other:
            return one or other
        found: dict[str, Any] = {}
        kinds = kinds_of({"type": one["type"]}, self) if "type" in one else None
        if "type" in other:
            others = kinds_of({"type": other["type"]}, self)
            kinds = others if kinds is None else kinds & others
        if kinds is not None:
            if "fraction" in kinds and "integer" not in kinds:
                kinds -= NUMBERS
            types = of_kinds(kinds)
            if types is False:
                return False
            found |= types if isinstance(types, dict) else {}
        for keys, choose in ((LARGEST, max), (SMALLEST, min)):
            for key in keys:
                values = [each[key] for each in (one, other) if key in each]
                found |= {key: choose(values)} if values else {}
        for key in ALIKE:
            distinct = {each[key] for each in (one, other) if key in each}
            if len(distinct) > 1:
                raise _TooLarge
            if distinct:
                found[key] = distinct.pop()
        self._join_values(found, one, other)
        if found.get("enum") == []:
            return False
        self._join_arrays(found, one, other)
        self._join_objects(found, one, other)
        return found

    def _join_values(self, found: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
        excluded = [*one.get("notEnum", ()), *other.get("notEnum", ())]
        if excluded:
            found["notEnum"] = list(dict.fromkeys(excluded))
        lists = [each["enum"] for each in (one, other) if "enum" in each]
        if lists:
            allowed = set(map(canonical_key, lists[-1]))
            rules = {key: value for key, value in (*one.items(), *other.items()) if key != "enum"} | found
            kinds = kinds_of(rules, self)
            found["enum"] = [
                value
                for value in lists[0]
                if canonical_key(value) in allowed
                and (kind_of(value) in kinds or (kind_of(value) in NUMBERS and kinds & NUMBERS))
                and not is_excluded(value, kind_of(value), rules)
            ]

    def _join_arrays(self, found: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
        prefixes = [each.get("prefixItems", []) for each in (one, other)]
        rests = [each.get("items", True) for each in (one, other)]
        size = max(map(len, prefixes))
        if size:
            found["prefixItems"] = [
                self._both(
                    *(prefix[i] if i < len(prefix) else rest for prefix, rest in zip(prefixes, rests, strict=True))
                )
                for i in range(size)
            ]
        if any("items" in each for each in (one, other)):
            found["items"] = self._both(*rests)

    def _join_objects(self, found: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
        pair = (one, other)
        names = list(dict.fromkeys(name for each in pair for name in each.get("properties", ())))
        if names:
            found["properties"] = {name: self._both(*(_property(each, name) for each in pair)) for name in names}
        patterns = list(dict.fromkeys(name for each in pair for name in each.get("patternProperties", ())))
        rests = [each.get("additionalProperties", True) for each in pair]
        if patterns:
            owns = [each.get("patternProperties", {}) for each in pair]
            if len(patterns) > 1 and all(owns):
                raise _TooLarge  # both apply to a name that matches both
            if any(rest is not True and not own for own, rest in zip(owns, rests, strict=True)) and any(
                texts.matches(pattern, name) is not False for pattern in patterns for name in names
            ):
                raise _TooLarge  # llguidance applies a matching pattern to a named property too
            found["patternProperties"] = {
                pattern: self._both(*(own.get(pattern, rest) for own, rest in zip(owns, rests, strict=True)))
                for pattern in patterns
            }
        if any("additionalProperties" in each for each in pair):
            found["additionalProperties"] = self._both(*rests)
        required = list(dict.fromkeys(name for each in pair for name in each.get("required", ())))
        if required:
            found["required"] = required

    def _both(self, one: Core, other: Core) -> Core:
        if one is True or other is True or one is False or other is False:
            return False if False in (one, other) else other if one is True else one
        if json.dumps(one) == json.dumps(other):
            return one
        flat = [inner for part in (one, other) for inner in self._conjuncts(part)]
        parts = list({json.dumps(part): part for part in flat}.values())
        if not any(_keys_in(part) for part in parts):
            return {"allOf": parts}
        text = json.dumps(parts)
        self._spend(1 + len(text) // 256)
        key = self._keys.setdefault(text, f"{OWN}{len(self._keys)}")
        self._bodies.setdefault(key, {"allOf": parts})
        return {"$ref": key}

    def _conjuncts(self, core: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a conjunction's parts; expands conjunctions created here, so that cycles close."""
        body = self._bodies[core["$ref"]] if core.get("$ref", "").startswith(OWN) else core
        parts: list[dict[str, Any]] = body.get("allOf", [body]) if isinstance(body, dict) else []
        return parts


def _without_empty_kinds(core: dict[str, Any]) -> Core:
    kinds = kinds_of(core, NO_CONTEXT)
    properties = core.get("properties", {})
    if any(properties.get(name, True) is False for name in core.get("required", ())):
        kinds -= {"object"}
    for kind, least, most in SIZES:
        if core.get(least, 0) > core.get(most, math.inf):
            kinds -= {kind}
    if has_no_number(core, {}):
        kinds -= NUMBERS
    if kinds == kinds_of(core, NO_CONTEXT) or "enum" in core:
        return core if kinds and core.get("enum") != [] else False
    types = of_kinds(kinds)
    return {**core, **types} if isinstance(types, dict) else types


def _without(core: Core, empty: Collection[str]) -> Core:
    if isinstance(core, bool):
        return core
    if "$ref" in core:
        return core["$ref"] not in empty and core
    if "anyOf" in core:
        return any_of(_without(part, empty) for part in core["anyOf"])
    if "allOf" in core:
        parts = [_without(part, empty) for part in core["allOf"]]
        return False if False in parts else {"allOf": [part for part in parts if part is not True]}
    found = dict(core)
    for key in ("properties", "patternProperties"):
        if key in core:
            found[key] = {name: _without(part, empty) for name, part in core[key].items()}
    for key in ("items", "additionalProperties"):
        if key in core:
            found[key] = _without(core[key], empty)
    if "prefixItems" in core:
        found["prefixItems"] = [_without(part, empty) for part in core["prefixItems"]]
    return _without_empty_kinds(found)


def _property(core: dict[str, Any], name: str) -> Core:
    properties: dict[str, Core] = core.get("properties", {})
    if name in properties:
        return properties[name]
    patterned: dict[str, Core] = core.get("patternProperties", {})
    for pattern, part in patterned.items():
        is_match = texts.matches(pattern, name)
        if is_match is None:
            raise _TooLarge
        if is_match:
            return part
    others: Core = core.get("additionalProperties", True)
    return others


def _keys_in(core: Core) -> list[str]:
    found, stack = [], [core]
    while stack:
        item = stack.pop()
        if isinstance(item, bool):
            continue
        if "$ref" in item:
            found.append(item["$ref"])
        for key in ("allOf", "anyOf", "prefixItems"):
            stack += item.get(key, ())
        for key in ("properties", "patternProperties"):
            stack += item.get(key, {}).values()
        stack += [item[key] for key in ("items", "additionalProperties") if key in item]
    return found


def _joined(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Concatenate without duplicates: a repeated reference is the same object."""
    known = set(map(id, one))
    return [*one, *(part for part in other if id(part) not in known)]
