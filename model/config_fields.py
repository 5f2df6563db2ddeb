"""Typed reading of one parsed configuration file: every value is of the wanted type and range, or refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from model.errors import ModelError

MAX_TOKEN_ID = (1 << 31) - 1
"""Token ids travel as int32."""

REQUIRED = object()
"""Default of a field that must be there."""


@dataclass(frozen=True)
class Fields:
    """`raw` as it stands in the file `source`; a field that is null counts as left out."""

    raw: dict[str, Any]
    source: str

    def error(self, name: str, problem: str) -> ModelError:
        """What to raise of a field: file, name and problem, in 500 characters at most."""
        return ModelError(f"{self.source}: {name}: {problem}"[:500])

    def get(self, name: str) -> Any:
        """The value as it stands, None where it is left out."""
        return self.raw.get(name)

    def integer(self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int) -> Any:
        """An int in low..high. Raises ModelError, as all readers here: for another value, or none without `default`."""
        value = self._value(name, default)
        if value is default:
            return default
        if type(value) is not int:
            raise self.error(name, f"{value!r} is not an integer")
        if not low <= value <= high:
            raise self.error(name, f"{value} is outside {low}..{high}")
        return value

    def number(
        self, name: str, default: Any = REQUIRED, *, low: float = 0, high: float, above: float = -math.inf
    ) -> Any:
        """A finite number as float in low..high and greater than `above`."""
        value = self._value(name, default)
        if value is default:
            return default
        if type(value) not in (int, float):
            raise self.error(name, f"{value!r} is not a number")
        if not (low <= value <= high and value > above):
            raise self.error(name, f"{value} is outside {'' if above < low else 'above '}{low:g}..{high:g}")
        return float(value)

    def boolean(self, name: str, default: Any = REQUIRED) -> Any:
        """True or false. Raises ModelError."""
        value = self._value(name, default)
        if value is not default and type(value) is not bool:
            raise self.error(name, f"{value!r} is not true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """A str. Raises ModelError."""
        value = self._value(name, default)
        if value is not default and type(value) is not str:
            raise self.error(name, f"{value!r} is not a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids; () where the field is left out."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
            raise self.error(name, f"{value!r} is not a token id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> Fields | None:
        """The object under `name`; None where it is left out."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "not an object")
        return Fields(value, f"{self.source}: {name}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(name, "missing")
        return default
