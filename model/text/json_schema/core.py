"""Core schemas: the few keywords that grammars use, and proofs about them.

A core schema is True, False, {"$ref": key}, {"allOf": [...]}, {"anyOf": [...]} or assertions: llguidance's keywords,
with `enum` for `const`, `prefixItems` for a list in `items`, and `notEnum` for excluded strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

Core = bool | dict[str, Any]
Kinds = frozenset[str]

ALL: Kinds = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""All kinds; the type `number` is `integer` and `fraction`."""
NUMBERS: Kinds = frozenset({"integer", "fraction"})
OBJECT, ARRAY, STRING = frozenset({"object"}), frozenset({"array"}), frozenset({"string"})

MAX_DEPTH = 24
"""Max references and applicators that a proof follows."""
MAX_ALTERNATIVES = 256
"""Max alternatives of a multiplied-out conjunction."""


class ProofContext(Protocol):
    """Queries of proofs while schemas are rewritten."""

    def lookup(self, key: str) -> Core:
        """Return the body of a reference; True if not known yet."""

    def no_text_fits(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return whether provably no text matches both assertions."""


class _NoContext:
    def lookup(self, _key: str) -> Core:
        return True

    def no_text_fits(self, _one: dict[str, Any], _other: dict[str, Any]) -> bool:
        return False


NO_CONTEXT: ProofContext = _NoContext()


def all_of(parts: Iterable[Core], known: ProofContext = NO_CONTEXT) -> Core:
    """Return the conjunction of `parts`, in order, without contradictory alternatives."""
    flat: list[dict[str, Any]] = []
    for part in parts:
        if part is False:
            return False
        if part is not True:
            flat += part.get("allOf", [part])
    if sum("anyOf" in part for part in flat) > 1:
        return _multiplied(flat, known)
    return _conjunction(flat)


def any_of(parts: Iterable[Core]) -> Core:
    flat: list[dict[str, Any]] = []
    for part in parts:
        if part is True:
            return True
        if part is not False:
            flat += part["anyOf"] if set(part) == {"anyOf"} else [part]
    unique = list({json.dumps(part): part for part in flat}.values()) if len(flat) <= MAX_ALTERNATIVES else flat
    return {"anyOf": unique} if len(unique) > 1 else unique[0] if unique else False


def of_kinds(kinds: Collection[str]) -> Core:
    """Return a schema of these kinds; `fraction` requires `integer`."""
    if set(kinds) >= ALL:
        return True
    types = [kind for kind in ("null", "boolean", "integer", "string", "array", "object") if kind in kinds]
    if "fraction" in kinds:
        types[types.index("integer")] = "number"
    return {"type": types[0] if len(types) == 1 else types} if types else False


def type_assertion(kinds: Collection[str]) -> dict[str, Any]:
    """Return `of_kinds` as an assertion; {} for all kinds."""
    core = of_kinds(kinds)
    return core if isinstance(core, dict) else {}


def kinds_of_type(name: str) -> Kinds:
    return NUMBERS if name == "number" else frozenset({name})


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def canonical_key(value: Any) -> str:
    """Return a key that is equal for equal JSON values: 1 equals 1.0, not true."""
    if isinstance(value, float) and value.is_integer() and math.isfinite(value):
        return json.dumps(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(canonical_key, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{canonical_key(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


def kinds_of(core: Core, known: ProofContext, depth: int = 0) -> Kinds:
    """Return the kinds that `core` allows, or a superset."""
    if isinstance(core, bool) or depth > MAX_DEPTH:
        return frozenset() if core is False else ALL
    if "$ref" in core:
        return kinds_of(known.lookup(core["$ref"]), known, depth + 1)
    if "allOf" in core:
        return frozenset.intersection(*(kinds_of(part, known, depth + 1) for part in core["allOf"]))
    if "anyOf" in core:
        return frozenset().union(*(kinds_of(part, known, depth + 1) for part in core["anyOf"]))
    found = ALL
    if "enum" in core:
        found &= frozenset(map(kind_of, core["enum"]))
    if "type" in core:
        types = [core["type"]] if isinstance(core["type"], str) else core["type"]
        found &= frozenset().union(*map(kinds_of_type, types))
    return found


def values_of(core: Core, known: ProofContext, depth: int = 0) -> list[Any] | None:
    """Return the values that `core` allows, or a superset; None if many or unknown."""
    if isinstance(core, bool) or depth > MAX_DEPTH:
        return [] if core is False else None
    if "$ref" in core:
        return values_of(known.lookup(core["$ref"]), known, depth + 1)
    if "allOf" in core:
        lists = [values for part in core["allOf"] if (values := values_of(part, known, depth + 1)) is not None]
        return min(lists, key=len, default=None)
    if "anyOf" in core:
        lists = [values for part in core["anyOf"] if (values := values_of(part, known, depth + 1)) is not None]
        if len(lists) < len(core["anyOf"]):
            return None
        return list({canonical_key(value): value for values in lists for value in values}.values())
    if "enum" in core:
        kinds = kinds_of(core, known, depth)
        return list({canonical_key(value): value for value in core["enum"] if kind_of(value) in kinds}.values())
    kinds = kinds_of(core, known, depth)
    if kinds <= {"null", "boolean"}:
        return [None] * ("null" in kinds) + [True, False] * ("boolean" in kinds)
    return None


def plain_values(core: Core) -> list[Any]:
    """Return the values of a pure `enum`, else []."""
    return core["enum"] if isinstance(core, dict) and "enum" in core and set(core) <= {"enum", "type"} else []


def are_disjoint(one: Core, other: Core, known: ProofContext, depth: int = 0) -> bool:
    """Return whether provably no value matches both."""
    if one is False or other is False:
        return True
    if depth > MAX_DEPTH:
        return False
    for first, second in ((one, other), (other, one)):
        if isinstance(first, bool):
            continue
        if "$ref" in first:
            return are_disjoint(known.lookup(first["$ref"]), second, known, depth + 1)
        if "anyOf" in first:
            return all(are_disjoint(part, second, known, depth + 1) for part in first["anyOf"])
    for first, second in ((one, other), (other, one)):
        if not isinstance(first, bool) and "allOf" in first:
            return any(are_disjoint(part, second, known, depth + 1) for part in first["allOf"])
    if isinstance(one, bool) or isinstance(other, bool):
        return False
    kinds = kinds_of(one, known) & kinds_of(other, known)
    return all(_are_disjoint_in(kind, one, other, known, depth) for kind in kinds)


class Exclusions:
    """Caches which parts of a conjunction exclude each other."""

    def __init__(self, parts: Iterable[Core], known: ProofContext) -> None:
        """Treat properties that a plain part requires as required everywhere."""
        own = (part.get("required", ()) for part in parts if isinstance(part, dict))
        self._names = list(dict.fromkeys(name for names in own for name in names))
        self._known = known
        self._answers: dict[tuple[int, int], bool] = {}
        self._parts: list[dict[str, Any]] = []  # kept alive, so that ids stay unique

    def any_between(self, ones: Iterable[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
        """Return whether provably no value matches all of `ones` and `others`."""
        return any(self._exclude(one, other) for one in ones for other in others)

    def _exclude(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        key = (id(one), id(other))
        if key not in self._answers:
            self._parts += (one, other)
            self._answers[key] = are_disjoint(one, requiring(other, self._names, self._known), self._known)
        return self._answers[key]


def property_of(core: dict[str, Any], name: str) -> Core:
    properties: dict[str, Core] = core.get("properties", {})
    others: Core = True if "patternProperties" in core else core.get("additionalProperties", True)
    return properties.get(name, others)


def item_of(core: dict[str, Any], index: int) -> Core:
    prefix = core.get("prefixItems", ())
    item: Core = prefix[index] if index < len(prefix) else core.get("items", True)
    return item


def names_in(core: Core, known: ProofContext, depth: int = 0) -> set[str]:
    if isinstance(core, bool) or depth > MAX_DEPTH:
        return set()
    if "$ref" in core:
        return names_in(known.lookup(core["$ref"]), known, depth + 1)
    parts = core.get("allOf", core.get("anyOf"))
    if parts is not None:
        return set().union(*(names_in(part, known, depth + 1) for part in parts))
    return set(core.get("properties", ())) | set(core.get("required", ()))


def requiring(core: Core, names: Sequence[str], known: ProofContext, depth: int = 0) -> Core:
    """Return `core` with `names` required, for a proof of disjointness."""
    if isinstance(core, bool) or not names or depth > MAX_DEPTH:
        return core
    if "$ref" in core:
        return requiring(known.lookup(core["$ref"]), names, known, depth + 1)
    for key in ("allOf", "anyOf"):
        if key in core:
            return {key: [requiring(part, names, known, depth + 1) for part in core[key]]}
    return {**core, "required": [*core.get("required", ()), *names]}


def other_texts(texts: Sequence[str]) -> str:
    """Return a regular expression that matches all other texts."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_others(tree)}$"


def _others(node: dict[str, Any]) -> str:
    chars = [char for char in node if char]
    options = [] if "" in node else [""]
    options.append(f"[^{''.join(map(_escaped, chars))}]{ANYTHING}" if chars else ANYTHING[:-1] + "+")
    options += [_escaped(char) + _others(node[char]) for char in chars]
    return f"(?:{'|'.join(options)})"


ANYTHING = r"[\s\S]*"


def _escaped(char: str) -> str:
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}"


def _multiplied(flat: list[dict[str, Any]], known: ProofContext) -> Core:
    found: list[list[dict[str, Any]]] = [[]]
    exclusions = Exclusions(flat, known)
    for part in flat:
        options = part.get("anyOf", [part])
        found = [
            [*before, option] for before in found for option in options if not exclusions.any_between(before, [option])
        ]
        if len(found) > MAX_ALTERNATIVES:
            return _conjunction(flat)
    return any_of(_conjunction(parts) for parts in found)


def _conjunction(parts: list[dict[str, Any]]) -> Core:
    flat = [inner for part in parts for inner in (part.get("allOf", [part]))]
    return {"allOf": flat} if len(flat) > 1 else flat[0] if flat else True


def _are_disjoint_in(kind: str, one: dict[str, Any], other: dict[str, Any], known: ProofContext, depth: int) -> bool:
    for first, second in ((one, other), (other, one)):
        if "enum" in first:
            values = [value for value in first["enum"] if kind_of(value) == kind]
            if all(is_excluded(value, kind, second) for value in values):
                return True
    if kind == "object":
        required = {*one.get("required", ()), *other.get("required", ())}
        return _is_empty(one, other, "minProperties", "maxProperties") or any(
            are_disjoint(property_of(one, name), property_of(other, name), known, depth + 1)
            for name in sorted(required)
        )
    if kind == "array":
        num_items = max(one.get("minItems", 0), other.get("minItems", 0))
        return _is_empty(one, other, "minItems", "maxItems") or any(
            are_disjoint(item_of(one, i), item_of(other, i), known, depth + 1) for i in range(min(num_items, 16))
        )
    if kind == "string":
        return _is_empty(one, other, "minLength", "maxLength") or known.no_text_fits(one, other)
    return kind in NUMBERS and has_no_number(one, other)


def is_excluded(value: Any, kind: str, core: dict[str, Any]) -> bool:
    """Return whether `core` provably forbids `value`, whose kind it allows."""
    if "enum" in core:
        return canonical_key(value) not in map(canonical_key, core["enum"])
    if kind == "string":
        is_out = value in core.get("notEnum", ())
        return is_out or not core.get("minLength", 0) <= len(value) <= core.get("maxLength", math.inf)
    if kind in NUMBERS:
        return has_no_number(core, {"minimum": value, "maximum": value})
    if kind == "object":
        return any(name not in value for name in core.get("required", ()))
    if kind == "array":
        return not core.get("minItems", 0) <= len(value) <= core.get("maxItems", math.inf)
    return False


def _is_empty(one: dict[str, Any], other: dict[str, Any], least: str, most: str) -> bool:
    return bool(max(one.get(least, 0), other.get(least, 0)) > min(one.get(most, math.inf), other.get(most, math.inf)))


def has_no_number(one: dict[str, Any], other: dict[str, Any]) -> bool:
    bounds = [(key, core[key]) for core in (one, other) for key in (*LOW, *HIGH) if key in core]
    low = max((value for key, value in bounds if key in LOW), default=-math.inf)
    high = min((value for key, value in bounds if key in HIGH), default=math.inf)
    is_open = any(key.startswith("exclusive") and value in (low, high) for key, value in bounds)
    return low > high or (low == high and is_open)


LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
