"""Counts the regular expressions of a JSON schema that one text must match together.

llguidance intersects them where schemas meet: in `allOf`, through `$ref`, next to `anyOf` and `oneOf`, and so in shared
properties and items. The states of an intersection multiply, so few may meet. The count is never too high; where
choices multiply it may be too low, and the limits of the compiling process remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_MEETING_PATTERNS = 12
MAX_PATTERN_KEYS = 64
"""`patternProperties` of schemas that meet: each pair is compared."""
MAX_VISITS = 20_000
"""Places visited. A larger schema is left to the limits on time and memory."""

Schema = Mapping[str, Any]


def meeting_patterns(root: Any) -> tuple[int, int]:
    """Return the largest number of `pattern` values, and of `patternProperties` keys, that meet in one place."""
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
        """Yield the schemas that apply to one text, once for each choice that any of them offers."""
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
        """Return all schemas that apply wherever `schemas` do, and the choices that they offer."""
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
        """Return the target of a reference within the schema; None if unknown here."""
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
    """Return the subschemas that meet in one property, item or rest."""
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
