"""Untrusted JSON objects: bounded, without duplicate names or NaN."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from model.errors import ModelError


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read an object. Raises ModelError if the file is missing, too large or invalid."""
    return parse_json_object(read_bytes(path, max_bytes), str(path))


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises ModelError."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ModelError(f"{path}: larger than {max_bytes} bytes")
    return data


def open_regular(path: Path) -> int:
    """Open a regular file, without blocking on a pipe. Raises ModelError or OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may have effects
        raise ModelError(f"{path}: not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path}: not a regular file")
    return descriptor


def parse_json_object(data: bytes, source: str) -> dict[str, Any]:
    """Parse an object in UTF-8. Raises ModelError, which names `source`, if invalid."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ModelError(f"{source}: JSON nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:100]!r} occurs twice")
            seen.add(name)
    return names


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
