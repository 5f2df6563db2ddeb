"""What a model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Function:
    """The schema of its arguments is bounded when a grammar is made of it."""

    name: str
    parameters: Any  # JSON schema
    is_strict: bool = False  # the schema also holds where tool_choice is auto
