"""Function calls to enforce, with the usual arguments key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.text.tool_calls.formats import CallFormat, CallSpec
from model.text.tool_calls.reader import Function


def spec_of(
    call_format: CallFormat, functions: Sequence[Function], arguments_key: str = "arguments", **options: Any
) -> CallSpec:
    return CallSpec(format=call_format, functions=tuple(functions), arguments_key=arguments_key, **options)
