"""Strict parsers of bench flags; errors name the flag."""

from __future__ import annotations

import math

from service.errors import StartupError

MOST = 1 << 20


def whole_number(flag: str, text: str, low: int = 1, high: int = MOST) -> int:
    """Parse a whole number in low..high. Raises StartupError."""
    try:
        value = int(text)
    except ValueError:
        raise StartupError(f"{flag}: {text!r} is not a whole number") from None
    if not low <= value <= high:
        raise StartupError(f"{flag}: {text} is out of range ({low}..{high})")
    return value


def positive_number(flag: str, text: str, high: float = 1e6) -> float:
    """Parse a number in (0, high]. Raises StartupError."""
    try:
        value = float(text)
    except ValueError:
        raise StartupError(f"{flag}: {text!r} is not a number") from None
    if not (math.isfinite(value) and 0 < value <= high):
        raise StartupError(f"{flag}: {text} is not above 0 and at most {high:g}")
    return value


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Parse "1,64,256". Raises StartupError."""
    return tuple(whole_number(flag, part.strip()) for part in text.split(","))


def product(flag: str, text: str) -> tuple[int, int]:
    """Parse "64x1024". Raises StartupError."""
    factors = text.lower().split("x")
    if len(factors) != 2:
        raise StartupError(f"{flag}: {text!r} is not of the form 64x1024")
    return whole_number(flag, factors[0].strip()), whole_number(flag, factors[1].strip())
