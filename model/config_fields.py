"""Typed reading of a parsed config file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from model.errors import ModelError

MAX_TOKEN_ID = (1 << 31) - 1

NO_WINDOW = 1 << 30
"""Window of a layer that attends to all tokens."""

REQUIRED = object()


@dataclass(frozen=True)
class Fields:
    """Fields of the file `source`; null counts as absent.

    Readers raise ModelError for a wrong type or range, or an absent field without `default`.
    """

    raw: dict[str, Any]
    source: str

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.source}: {name}: {problem}"[:500])

    def get(self, name: str) -> Any:
        return self.raw.get(name)

    def integer(self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int) -> Any:
        """Return an int in low..high."""
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
        """Return a finite float in low..high and greater than `above`."""
        value = self._value(name, default)
        if value is default:
            return default
        if type(value) not in (int, float):
            raise self.error(name, f"{value!r} is not a number")
        if not (low <= value <= high and value > above):
            raise self.error(name, f"{value} is outside {'' if above < low else 'above '}{low:g}..{high:g}")
        return float(value)

    def boolean(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._value(name, default)
        if value is not default and type(value) is not bool:
            raise self.error(name, f"{value!r} is not true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._value(name, default)
        if value is not default and type(value) is not str:
            raise self.error(name, f"{value!r} is not a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one id or a list of ids; () if absent."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
            raise self.error(name, f"{value!r} is not a token id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> Fields | None:
        """Return the object under `name`, or None if absent."""
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
