"""Safetensors file, read by position: a truncated file raises an error, where a memory map would kill the process."""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.json_files import open_regular, parse_json_object

HEADER_BYTES = 100_000_000
"""Limit of the format's own reader."""

FLOAT_DTYPES = {
    "F32": NUMPY_DTYPES["float32"],
    "F16": NUMPY_DTYPES["float16"],
    "BF16": NUMPY_DTYPES["bfloat16"],
}
STORED_DTYPES = FLOAT_DTYPES | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
DTYPE_WORDS = {dtype: word for word, dtype in STORED_DTYPES.items()}
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 40


class StoredFile:
    def __init__(self, path: Path):
        """Open a regular file. Raises OSError, ModelError."""
        self.path = path
        self.descriptor = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):  # threads read neighbouring pieces: read-ahead would repeat them
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class StoredTensor:
    name: str
    file: StoredFile
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill contiguous `out`, of the tensor's dtype, from element `start` on, unchecked.

        Thread-safe. Raises ModelError if the file is truncated or unreadable.
        """
        rest = out.reshape(-1).view(np.uint8).data
        position = self.offset + start * self.dtype.itemsize
        try:
            while rest:
                num_bytes = os.preadv(self.file.descriptor, [rest], position)
                if num_bytes == 0:
                    raise ModelError(f"{self._named()}: ends beyond the file; the file was cut short")
                rest, position = rest[num_bytes:], position + num_bytes
        except OSError as error:
            raise ModelError(f"{self._named()}: cannot be read: {error.strerror}") from None

    def values(self) -> np.ndarray:
        """Return the whole tensor. Raises ModelError."""
        out = np.empty(self.shape, self.dtype)
        self.read_into(0, out)
        return out

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop - 1. Raises ModelError."""
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self.read_into(start * math.prod(self.shape[1:]), out)
        return out

    def columns(self, start: int, stop: int) -> np.ndarray:
        """Return columns start..stop - 1 of a matrix, [R, stop - start]. Raises ModelError."""
        num_rows, width = self.shape
        if 2 * (stop - start) >= width:
            return np.ascontiguousarray(self.values()[:, start:stop])
        out = np.empty((num_rows, stop - start), self.dtype)
        for row in range(num_rows):
            self.read_into(row * width + start, out[row])
        return out

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self._named()}: {problem}")

    def _named(self) -> str:
        return f"{self.file}: tensor {self.name[:200]!r}"


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor by name. Raises ModelError with the file and the tensor.

    Checks the header's size and JSON, dtypes, shapes, and that byte ranges fill the file without overlap or gap.
    """
    header_end, num_data_bytes, text = _read_header(path)
    file = _opened(path)
    header = parse_json_object(text, str(path))
    header.pop("__metadata__", None)
    tensors, ranges = {}, []
    for name, entry in header.items():
        shape, dtype, begin, end = _checked_entry(f"{path}: tensor {name[:200]!r}", entry)
        ranges.append((begin, end, name))
        if end > num_data_bytes:
            raise ModelError(f"{path}: tensor {name[:200]!r}: ends beyond the file; the file is cut short")
        tensors[name] = StoredTensor(name, file, dtype, shape, header_end + begin)
    _check_ranges(path, ranges, num_data_bytes)
    return tensors


def _opened(path: Path) -> StoredFile:
    try:
        return StoredFile(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _read_header(path: Path) -> tuple[int, int, bytes]:
    """Return (end of the header, bytes after it, its JSON)."""
    try:
        with open(open_regular(path), "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes < 8:
                raise ModelError(f"{path}: not a safetensors file (shorter than its first field)")
            header_end = 8 + int.from_bytes(file.read(8), "little")
            if header_end > min(num_bytes, 8 + HEADER_BYTES):
                raise ModelError(f"{path}: the header ends at byte {header_end}, beyond the file or the largest header")
            return header_end, num_bytes - header_end, file.read(header_end - 8)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _checked_entry(what: str, entry: Any) -> tuple[tuple[int, ...], np.dtype, int, int]:
    """Return (shape, dtype, first byte, byte after the last)."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{what}: not described by dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in STORED_DTYPES:
        raise ModelError(f"{what}: dtype {str(entry['dtype'])[:40]!r} is not one of {', '.join(STORED_DTYPES)}")
    dtype, shape, offsets = STORED_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
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
