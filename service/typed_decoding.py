"""Decoding into a type, safe in threads.

msgspec 0.22 builds a type's table at its first use, and a second thread that uses it meanwhile reads NULL: the process
dies. So the first use of each type is alone. `msgspec.json.Decoder(Kind)` in a module is safe too.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")

_built: set[Any] = set()
_building = threading.Lock()


def convert(value: Any, kind: type[Kind], *, builtin_types: tuple[type, ...] = ()) -> Kind:
    """Raises msgspec.ValidationError."""
    _build(kind)
    return msgspec.convert(value, kind, builtin_types=builtin_types)


def decode_json(data: bytes | str, kind: type[Kind]) -> Kind:
    """Raises msgspec.DecodeError, or ValidationError, a kind of it."""
    _build(kind)
    return msgspec.json.decode(data, type=kind)


def decode_msgpack(data: bytes, kind: type[Kind]) -> Kind:
    """Raises msgspec.DecodeError, or ValidationError, a kind of it."""
    _build(kind)
    return msgspec.msgpack.decode(data, type=kind)


def _build(kind: Any) -> None:
    if kind not in _built:
        with _building:
            msgspec.json.Decoder(kind)
        _built.add(kind)
