"""A function that a model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Function:
    """A callable function. The schema is bounded when a grammar is built from it."""

    name: str
    parameters: Any  # JSON schema
    is_strict: bool = False  # enforce the schema even if tool_choice is auto
