"""Writes safetensors files by hand, for tests that break the format's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from model.weights.safetensors_file import DTYPE_WORDS, StoredTensor


def entries_of(tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Return a valid (header, data)."""
    header, end, values = {}, 0, []
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        values.append(array.tobytes())
        header[name] = {
            "dtype": DTYPE_WORDS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    return header, b"".join(values)


def write(path: Path, header: dict[str, Any] | bytes, data: bytes, header_bytes: int | None = None) -> None:
    """Write a file of header (bytes unchanged) and data; `header_bytes`: the length that it claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data)


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    write(path, *entries_of(tensors))


def stored_values(tensor: StoredTensor) -> np.ndarray:
    """Return a whole tensor as stored."""
    return tensor.values()
