"""Thread-safe decoding into types, and their descriptions.

msgspec 0.22 builds a type's table at its first use; a second thread that uses the type meanwhile reads NULL and crashes
the process. So the first use of each type is serialized. Inspecting a type and generating its JSON schema build the
table too. A module-level `msgspec.json.Decoder(Kind)` is safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

Kind = TypeVar("Kind")

_built: set[Any] = set()
_building = threading.Lock()


def convert(value: Any, kind: type[Kind], *, builtin_types: tuple[type, ...] = ()) -> Kind:
    """Convert `value` to `kind`. Raises msgspec.ValidationError."""
    _build(kind)
    return msgspec.convert(value, kind, builtin_types=builtin_types)


def decode_json(data: bytes | str, kind: type[Kind]) -> Kind:
    """Decode JSON. Raises msgspec.DecodeError or its subclass ValidationError."""
    _build(kind)
    return msgspec.json.decode(data, type=kind)


def decode_msgpack(data: bytes, kind: type[Kind]) -> Kind:
    """Decode MessagePack. Raises msgspec.DecodeError or its subclass ValidationError."""
    _build(kind)
    return msgspec.msgpack.decode(data, type=kind)


def fields_of(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    """Return a struct's fields in order."""
    _build(kind)
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def schemas_of(kinds: Iterable[Any], ref_template: str) -> dict[str, Any]:
    """Return the JSON schemas of `kinds` and the types they contain, by name."""
    kinds = tuple(kinds)
    for kind in kinds:
        _build(kind)
    return msgspec.json.schema_components(kinds, ref_template=ref_template)[1]


def _build(kind: Any) -> None:
    if kind not in _built:
        with _building:
            msgspec.json.Decoder(kind)
        _built.add(kind)
