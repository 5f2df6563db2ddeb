"""Writes safetensors files by hand, so that tests can break each rule of the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from model.weights.safetensors_file import WEIGHT_DTYPES, StoredTensor

DTYPE_NAMES = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}


def entries_of(tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """(header, data) as the format wants them."""
    header, data = {}, b""
    for name, array in tensors.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    return header, data


def write(path: Path, header: dict[str, Any] | bytes, data: bytes, header_bytes: int | None = None) -> None:
    """The file of a header (bytes are taken as they are) and data; `header_bytes` is the length it claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data)


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    write(path, *entries_of(tensors))


def stored_values(tensor: StoredTensor) -> np.ndarray:
    """All of a tensor, as it is stored."""
    out = np.empty(tensor.shape, tensor.dtype)
    tensor.read_into(0, out)
    return out
