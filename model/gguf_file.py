"""Reads and checks the header of a GGUF file: metadata and tensor locations."""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from model.errors import ModelError
from model.json_files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_ENTRIES = 1 << 17
MAX_KEPT_ELEMENTS = 1024
"""Longer arrays, such as a vocabulary, are replaced by their length."""

MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of type `kind`, rows [N, K] or [K], at byte `offset` of the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a file; long arrays are replaced by their length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    num_bytes: int  # of the file


def find_gguf(directory: Path) -> Path | None:
    """Return a folder's .gguf file or None. Raises ModelError for several."""
    found = sorted(path for path in directory.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"{directory}: {len(found)} .gguf files are there (1)")
    return found[0] if found else None


def read_gguf(path: Path) -> GgufHeader:
    """Read and check the header. Raises ModelError."""
    try:
        with open(open_regular(path), "rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    def __init__(self, path: Path, file: BinaryIO):
        self._path = path
        self._file = file
        self._num_bytes = os.fstat(file.fileno()).st_size
        self._left = min(self._num_bytes, MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC or self._scalar(4) not in VERSIONS:
            raise self._error("is not a GGUF file of version 2 or 3")
        num_tensors, num_entries = self._count(), self._count()
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = self._string()
            if name in metadata:
                raise self._error(f"metadata {name[:100]!r} occurs twice")
            metadata[name] = self._value(self._scalar(4))
        tensors = [self._tensor() for _ in range(num_tensors)]
        if len({tensor.name for tensor in tensors}) != num_tensors:
            raise self._error("names a tensor twice")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise self._error(f"general.alignment: {str(alignment)[:40]} is not supported")
        begin = -(-self._file.tell() // alignment) * alignment
        moved = {t.name: GgufTensor(t.name, t.kind, t.shape, begin + t.offset) for t in tensors}
        return GgufHeader(self._path, metadata, moved, self._num_bytes)

    def _tensor(self) -> GgufTensor:
        name, num_dimensions = self._string(), self._scalar(4)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name[:100]!r}: has {num_dimensions} dimensions")
        sizes = [self._scalar(10) for _ in range(num_dimensions)]
        if any(not 1 <= size <= MAX_DIMENSION for size in sizes) or math.prod(sizes) > MAX_DIMENSION:
            raise self._error(f"tensor {name[:100]!r}: shape {sizes} is not supported")
        kind, offset = self._scalar(4), self._scalar(10)
        return GgufTensor(name, kind, tuple(reversed(sizes)), offset)

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(kind)
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._error(f"metadata of type {kind} is not supported")
        element, length = self._scalar(4), self._scalar(10)
        if length > self._left or element == ARRAY:
            raise self._error("has an array beyond its header, or of arrays")
        if element in SCALARS and length > MAX_KEPT_ELEMENTS:
            self._take(length * struct.calcsize(SCALARS[element]))
            return length
        if length <= MAX_KEPT_ELEMENTS:
            return [self._value(element) for _ in range(length)]
        if element != STRING:
            raise self._error(f"metadata of type {element} is not supported")
        for _ in range(length):
            self._take(self._scalar(10))
        return length

    def _count(self) -> int:
        count = self._scalar(10)
        if count > MAX_ENTRIES:
            raise self._error(f"has {count} tensors or entries (at most {MAX_ENTRIES})")
        return int(count)

    def _scalar(self, kind: int) -> Any:
        format = "<" + SCALARS[kind]
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _string(self) -> str:
        try:
            return self._take(self._scalar(10)).decode()
        except UnicodeDecodeError:
            raise self._error("has a string that is not UTF-8") from None

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            raise self._error("ends within its header, or the header is too large")
        self._left -= num_bytes
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise self._error("was cut short")
        return data

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._path}: {problem}")
