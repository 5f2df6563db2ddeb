"""Writes a GGUF file of float tensors by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from model.weights.formats.gguf import PLAIN_TYPES

ALIGNMENT = 32
KINDS = {dtype: kind for kind, dtype in PLAIN_TYPES.items()}


def save_gguf(path: Path, metadata: dict[str, str | int | float], tensors: dict[str, np.ndarray]) -> None:
    """Write a file of version 3; a tensor's dimensions are stored from the innermost on."""
    text = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        text += _string(key) + _value(value)
    data = b""
    for name, array in tensors.items():
        text += _string(name) + struct.pack("<I", array.ndim)
        text += b"".join(struct.pack("<Q", size) for size in reversed(array.shape))
        text += struct.pack("<IQ", KINDS[array.dtype], len(data))
        data += array.tobytes()
        data += b"\0" * (-len(data) % ALIGNMENT)
    path.write_bytes(text + b"\0" * (-len(text) % ALIGNMENT) + data)


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
