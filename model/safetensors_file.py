"""One safetensors file, memory-mapped: nothing in its header is believed before it has been checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.strict_json import parse_json_object

HEADER_BYTES = 100_000_000
"""Largest header, as the format's own reader has it."""

WEIGHT_DTYPES = {
    "F32": NUMPY_DTYPES["float32"],
    "F16": NUMPY_DTYPES["float16"],
    "BF16": NUMPY_DTYPES["bfloat16"],
}
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 40


@dataclass(frozen=True)
class StoredTensor:
    """A tensor where it lies in its file. `array` is a read-only view of the mapped file; its values are unchecked."""

    name: str
    file: Path
    array: np.ndarray


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by name. Raises ModelError with the file and, where one is at fault, the tensor.

    Checked: the header's size and JSON, each dtype (float32, float16, bfloat16), that shape and byte range agree, and
    that the ranges fill the file from end to end without overlap, gap or rest.
    """
    data = _mapped(path)
    header_end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if header_end > min(len(data), 8 + HEADER_BYTES):
        raise ModelError(f"{path}: the header ends at byte {header_end}, beyond the file or the largest header")
    header = parse_json_object(data[8:header_end].tobytes(), str(path))
    header.pop("__metadata__", None)
    tensors, ranges = {}, []
    for name, entry in header.items():
        shape, dtype, begin, end = _checked_entry(f"{path}: tensor {name[:200]!r}", entry)
        ranges.append((begin, end, name))
        piece = data[header_end + begin : header_end + end]
        if len(piece) != end - begin:
            raise ModelError(f"{path}: tensor {name[:200]!r}: ends beyond the file; the file is cut short")
        tensors[name] = StoredTensor(name, path, piece.view(dtype).reshape(shape))
    _check_ranges(path, ranges, len(data) - header_end)
    return tensors


def _mapped(path: Path) -> np.ndarray:
    try:
        num_bytes = path.stat().st_size
        if num_bytes < 8 or not path.is_file():
            raise ModelError(f"{path}: not a safetensors file (shorter than its first field, or no file)")
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _checked_entry(what: str, entry: Any) -> tuple[tuple[int, ...], np.dtype, int, int]:
    """(shape, dtype, first byte, byte after the last) of a header's entry."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{what}: not described by dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in WEIGHT_DTYPES:
        raise ModelError(f"{what}: dtype {str(entry['dtype'])[:40]!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    dtype, shape, offsets = WEIGHT_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelError(f"{what}: shape is not a list of at most {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{what}: data_offsets is not a pair of byte positions")
    begin, end = offsets
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ModelError(f"{what}: shape {shape} of {entry['dtype']} does not take the {end - begin} bytes it has")
    return tuple(shape), dtype, begin, end


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in value)


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], num_bytes: int) -> None:
    reached = 0
    for begin, end, name in sorted(ranges):
        if begin != reached:
            problem = "overlaps another tensor" if begin < reached else "leaves a gap before it"
            raise ModelError(f"{path}: tensor {name[:200]!r}: {problem}")
        reached = end
    if reached != num_bytes:
        raise ModelError(f"{path}: {num_bytes - reached} bytes belong to no tensor")
