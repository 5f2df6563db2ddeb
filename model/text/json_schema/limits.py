"""Limits on a JSON schema's size, numbers and patterns.

llguidance intersects patterns where schemas meet: in `allOf`, `$ref`, next to `anyOf` and `oneOf`, and in shared
properties and items. The states multiply, so few patterns may meet. The count is a lower bound: where choices multiply
it may be too low, and only the compiling process's limits apply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from model.errors import GrammarError

MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMA_DEPTH = 128
MAX_REGEX_CHARS = 4096
MAX_PATTERN_CHARS = 16 << 10
"""Total over a schema's regular expressions."""
MAX_MULTIPLE = 100_000
"""Bounds the least common multiple and sum of all `multipleOf`: an automaton has a state per remainder."""
MAX_PLACES = 5
MAX_INTERSECTING_PATTERNS = 12
MAX_PATTERN_KEYS = 64
"""Max keys of schemas that meet: each pair is compared."""
MAX_VISITS = 20_000
"""Max places visited; the compiling process bounds larger schemas."""

Schema = Mapping[str, Any]


def check_schema(schema: Any) -> None:
    """Check a schema's size, numbers and patterns. Raises GrammarError."""
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("A JSON schema must be an object.")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise GrammarError("The JSON schema is not valid JSON.") from None
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise GrammarError(f"The JSON schema takes more than {MAX_SCHEMA_BYTES} bytes.")
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise GrammarError(f"The JSON schema nests more than {MAX_SCHEMA_DEPTH} deep.")
    _check_multiples([value for name, value in _members(schema) if name == "multipleOf"])
    patterns = [value for name, value in _members(schema) if name == "pattern" and isinstance(value, str)]
    patterns += [key for name, value in _members(schema) if name == "patternProperties" for key in _names(value)]
    if max(map(len, patterns), default=0) > MAX_REGEX_CHARS or sum(map(len, patterns)) > MAX_PATTERN_CHARS:
        raise GrammarError(f"The JSON schema's patterns exceed {MAX_REGEX_CHARS} characters, or {MAX_PATTERN_CHARS}.")


def check_intersections(schema: Mapping[str, Any]) -> None:
    num_patterns, num_keys = intersecting_patterns(schema)
    if num_patterns > MAX_INTERSECTING_PATTERNS:
        raise GrammarError(f"One text must match more than {MAX_INTERSECTING_PATTERNS} of the JSON schema's patterns.")
    if num_keys > MAX_PATTERN_KEYS:
        raise GrammarError(f"One object of the JSON schema has more than {MAX_PATTERN_KEYS} 'patternProperties'.")


def _check_multiples(values: Sequence[Any]) -> None:
    """Bound the decimals, scaled to integers jointly, as in llguidance."""
    numbers = [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]
    if max(numbers, default=0) > MAX_MULTIPLE:
        raise GrammarError(f"The JSON schema's 'multipleOf' exceed {MAX_MULTIPLE} together.")
    decimals = [Decimal(str(number)) for number in numbers]
    places = max((-int(decimal.as_tuple().exponent) for decimal in decimals), default=0)
    if places > MAX_PLACES:
        raise GrammarError(f"The JSON schema's 'multipleOf' may have {MAX_PLACES} decimal places.")
    common, total = 1, 0
    for decimal in decimals:
        scaled = int(decimal.scaleb(max(0, places)))
        common, total = math.lcm(common, scaled), total + scaled
        if common > MAX_MULTIPLE or total > MAX_MULTIPLE:
            raise GrammarError(f"The JSON schema's 'multipleOf' exceed {MAX_MULTIPLE} together.")


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            yield from item.items()
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def depth_of(value: Any) -> int:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, Mapping | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, Mapping) else item)]
    return depth


def intersecting_patterns(root: Any) -> tuple[int, int]:
    """Return the max numbers of `pattern` values and `patternProperties` keys that meet in one place."""
    return _Places(root).most()


class _Places:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_VISITS
        self._seen: set[frozenset[int]] = set()
        self._most = (0, 0)

    def most(self) -> tuple[int, int]:
        places: list[Sequence[Any]] = [[self._root]]
        while places and self._num_left > 0:
            for together in self._alternatives(places.pop()):
                key = frozenset(map(id, together))
                self._num_left -= len(together)
                if key in self._seen or self._num_left <= 0:
                    continue
                self._seen.add(key)
                patterns = sum(isinstance(one.get("pattern"), str) for one in together)
                keys = {name for one in together for name in _map(one, "patternProperties")}
                self._most = (max(self._most[0], patterns), max(self._most[1], len(keys)))
                inside = _places_inside(together)
                self._num_left -= sum(map(len, inside))
                places += inside
        return self._most

    def _alternatives(self, place: Sequence[Any]) -> Iterator[list[Schema]]:
        common, choices = self._flat(place)
        if not choices:
            yield common
        known = set(map(id, common))
        for choice in choices:
            if self._num_left <= 0:
                return
            own, _ = self._flat([choice])
            yield [*common, *(one for one in own if id(one) not in known)]

    def _flat(self, schemas: Sequence[Any]) -> tuple[list[Schema], list[Any]]:
        flat, choices, stack, seen = [], [], list(schemas), set()
        while stack and self._num_left > 0:
            schema = stack.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self._num_left -= 1
            flat.append(schema)
            stack += _list(schema, "allOf")
            for name in ("anyOf", "oneOf"):
                offered = _list(schema, name)
                choices += [] if True in offered else offered
            if isinstance(schema.get("$ref"), str):
                stack.append(self._target(schema["$ref"]))
        return flat, choices

    def _target(self, ref: str) -> Any:
        found = self._root
        if not ref.startswith("#"):
            return None
        for step in ref[1:].split("/")[1:]:
            self._num_left -= 1
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(found):
                found = found[int(step[:9])]
            else:
                return None
        return found


def _places_inside(together: Sequence[Schema]) -> list[list[Any]]:
    """Group the subschemas that meet in one property, item or rest."""
    found: dict[tuple[str, Any], list[Any]] = {}
    for one in together:
        for keyword in ("properties", "patternProperties"):
            for name, part in _map(one, keyword).items():
                found.setdefault((keyword, name), []).append(part)
        for keyword in ("additionalProperties", "items"):
            if isinstance(one.get(keyword), Mapping):
                found.setdefault((keyword, None), []).append(one[keyword])
        for index, part in enumerate(_list(one, "prefixItems")):
            found.setdefault(("prefixItems", index), []).append(part)
    return list(found.values())


def _map(schema: Schema, name: str) -> Mapping[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
