"""JSON schema documents: checks keywords, resolves references.

Drafts 4 to 2020-12 are read alike, except where they differ on a keyword.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from model.errors import GrammarError

MAX_SHOWN_CHARS = 120
MAX_EXACT = 2**53
"""Integers up to this are exact doubles, the grammar's numbers."""

_CONTROL = (
    r"(?:[\x00-\x07\x0b\x0e-\x1f\x7f]"
    r"|\\(?:(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|[xu]\{0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}|c.|[vae0]))"
)
_SINGLE_CONTROL = re.compile(
    rf"(?P<control>{_CONTROL}|\[(?:{_CONTROL}(?:-{_CONTROL})?)\])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL
)
CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that our JSON grammars cannot spell."""

LARGEST_ROUNDED = 2**65
"""Bounds below this may be rounded: the range of 64-bit integers."""

LARGEST_BOUND = 2**63 - 1024

SCHEMA_KEYWORDS = frozenset({
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAP_KEYWORDS = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
OLD_DRAFT = re.compile(r"https?://json-schema\.org/draft-0(?P<number>[3-7])/")


class Place(NamedTuple):
    """A schema inside the document."""

    schema: Any
    base: str  # base URI of its references
    at: str  # JSON pointer


def schema_error(keyword: str, at: str, why: str) -> GrammarError:
    pointer = "#" + (at if len(at) <= MAX_SHOWN_CHARS else "..." + at[-MAX_SHOWN_CHARS:])
    shown = "".join(char if char.isprintable() else "?" for char in pointer)
    return GrammarError(f"The JSON schema's '{keyword}' at '{shown}' {why}.")


class Document:
    """A schema with its embedded resources. Raises GrammarError if malformed."""

    def __init__(self, root: Any) -> None:
        dialect = root.get("$schema") if isinstance(root, Mapping) else None
        draft = OLD_DRAFT.match(dialect) if isinstance(dialect, str) else None
        self._id_keyword = "id" if draft and draft["number"] in "34" else "$id"
        self.ignores_siblings_of_refs = draft is not None
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic_anchors: dict[str, list[Place]] = {}
        self.num_recursive_anchors = 0
        self.root = Place(root, "", "")
        self._index()

    def child(self, place: Place, *steps: str | int) -> Place:
        found, at = place.schema, place.at
        for step in steps:
            found = found[step]
            at += "/" + str(step).replace("~", "~0").replace("/", "~1")
        return Place(found, self._base_of(found, place.base), at)

    def target(self, place: Place, keyword: str = "$ref") -> Place:
        """Return the schema that a reference in `place` points to."""
        ref = place.schema[keyword]
        if not isinstance(ref, str):
            raise schema_error(keyword, place.at, "must be a string")
        if keyword == "$dynamicRef":
            return self._dynamic_target(place, ref)
        if keyword == "$recursiveRef" and (ref != "#" or self.num_recursive_anchors > 1):
            raise schema_error(keyword, place.at, "cannot be enforced")
        found = self._find(place.base, ref)
        if found is None:
            raise schema_error(keyword, place.at, f"points to nothing in the schema: {_shown(ref)}")
        return found

    def items(self, place: Place) -> tuple[list[Place], Place | None]:
        """Return the schemas of an array's prefix items and of the rest."""
        schema = place.schema
        if isinstance(schema.get("items"), list):
            prefix = [self.child(place, "items", i) for i in range(len(schema["items"]))]
            return prefix, self.child(place, "additionalItems") if "additionalItems" in schema else None
        prefix = [self.child(place, "prefixItems", i) for i in range(len(schemas(place, "prefixItems", ())))]
        return prefix, self.child(place, "items") if "items" in schema else None

    def subschemas(self, place: Place) -> Iterator[Place]:
        if not isinstance(place.schema, Mapping):
            return
        for key, value in place.schema.items():
            if key in SCHEMA_KEYWORDS and isinstance(value, Mapping | bool):
                yield self.child(place, key)
            elif key in LIST_KEYWORDS and isinstance(value, list):
                yield from (self.child(place, key, i) for i in range(len(value)))
            elif key in MAP_KEYWORDS and isinstance(value, Mapping):
                yield from (self.child(place, key, name) for name in value)

    def _index(self) -> None:
        self.root = Place(self.root.schema, self._base_of(self.root.schema, ""), "")
        stack = [self.root]
        self._resources[""] = self.root
        while stack:
            place = stack.pop()
            if not isinstance(place.schema, Mapping):
                continue
            if isinstance(place.schema.get(self._id_keyword), str):
                self._resources.setdefault(place.base, place)
            for key in ("$anchor", "$dynamicAnchor"):
                name = place.schema.get(key)
                if isinstance(name, str):
                    self._anchors.setdefault((place.base, name), place)
                    if key == "$dynamicAnchor":
                        self._dynamic_anchors.setdefault(name, []).append(place)
            own_id = place.schema.get(self._id_keyword)
            if isinstance(own_id, str) and "#" in own_id[:-1]:
                self._anchors.setdefault((place.base, urldefrag(own_id).fragment), place)
            self.num_recursive_anchors += place.schema.get("$recursiveAnchor") is True
            stack += self.subschemas(place)

    def _base_of(self, schema: Any, base: str) -> str:
        if not isinstance(schema, Mapping) or not isinstance(schema.get(self._id_keyword), str):
            return base
        if self.ignores_siblings_of_refs and "$ref" in schema:
            return base
        return _joined(base, schema[self._id_keyword])[0]

    def _find(self, base: str, ref: str) -> Place | None:
        uri, fragment = _joined(base, ref)
        found = self.root if uri == self.root.base else self._resources.get(uri)
        if found is None or not fragment:
            return found
        if not fragment.startswith("/"):
            return self._anchors.get((uri, unquote(fragment)))
        for step in unquote(fragment).split("/")[1:]:
            step, schema = step.replace("~1", "/").replace("~0", "~"), found.schema
            if isinstance(schema, list) and re.fullmatch("[0-9]{1,9}", step) and int(step) < len(schema):
                found = self.child(found, int(step))
            elif isinstance(schema, Mapping) and step in schema:
                found = self.child(found, step)
            else:
                return None
        return found

    def _dynamic_target(self, place: Place, ref: str) -> Place:
        found = self._find(place.base, ref)
        name = ref.rpartition("#")[2]
        others = self._dynamic_anchors.get(name, [])
        if found is None:
            raise schema_error("$dynamicRef", place.at, f"points to nothing in the schema: {_shown(ref)}")
        if found in others and len(others) > 1:
            raise schema_error(
                "$dynamicRef", place.at, "cannot be enforced where several schemas have its $dynamicAnchor"
            )
        return found


def count(place: Place, keyword: str) -> int | None:
    """Return a keyword's non-negative integer, if present."""
    value = place.schema.get(keyword)
    if value is None and keyword not in place.schema:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_EXACT:
        raise schema_error(keyword, place.at, "must be a whole number of 0 or more")
    return value


def number(place: Place, keyword: str, *, rounds: bool = False) -> int | float | None:
    """Return a keyword's number, if present. Refuses an inexact double; `rounds` rounds a large integer inwards."""
    if keyword not in place.schema:
        return None
    value = place.schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise schema_error(keyword, place.at, "must be a number")
    if rounds and isinstance(value, int) and MAX_EXACT < abs(value) < LARGEST_ROUNDED:
        return _inwards(value, is_low="inimum" in keyword)
    if not is_exact(value):
        raise schema_error(keyword, place.at, "must be an exact double")
    return value


def _inwards(value: int, *, is_low: bool) -> int:
    """Round a bound inwards to a double in the range of 64-bit integers."""
    near = float(value)
    if is_low and near < value:
        near = math.nextafter(near, math.inf)
    elif not is_low and near > value:
        near = math.nextafter(near, -math.inf)
    return max(int(near), -LARGEST_BOUND) if is_low else min(int(near), LARGEST_BOUND)


def is_exact(value: int | float) -> bool:
    """Return whether a double, and so a grammar, represents the number exactly."""
    try:
        return math.isfinite(value) and (isinstance(value, float) or float(value) == value)
    except OverflowError:
        return False


def pattern(text: Any, keyword: str, at: str) -> str:
    """Check a pattern. Refuses control characters: llguidance reads a single one as empty text."""
    if not isinstance(text, str):
        raise schema_error(keyword, at, "must be a string")
    if any(token["control"] for token in _SINGLE_CONTROL.finditer(text)):
        raise schema_error(keyword, at, "cannot be enforced: it holds a control character")
    return text


def names(place: Place, keyword: str) -> list[str]:
    return _names(place.schema.get(keyword, []), keyword, place.at)


def name_lists(place: Place, keyword: str) -> dict[str, list[str]]:
    return {key: _names(value, keyword, place.at) for key, value in mapping(place, keyword).items()}


def mapping(place: Place, keyword: str) -> Mapping[str, Any]:
    value = place.schema.get(keyword, {})
    if not isinstance(value, Mapping):
        raise schema_error(keyword, place.at, "must be an object")
    return value


def schemas(place: Place, keyword: str, default: Any = None) -> Sequence[Any]:
    value = place.schema.get(keyword, default)
    if (not isinstance(value, list) and value is not default) or value is None:
        raise schema_error(keyword, place.at, "must be an array")
    return value


def _names(value: Any, keyword: str, at: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise schema_error(keyword, at, "must be an array of strings")
    return list(dict.fromkeys(value))


def _joined(base: str, ref: str) -> tuple[str, str]:
    try:
        uri, fragment = urldefrag(ref)
        if not uri:
            return base, fragment
        return (urldefrag(urljoin(base, uri)).url if "://" in base or not base else uri), fragment
    except ValueError:
        return ref, ""


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_SHOWN_CHARS])
