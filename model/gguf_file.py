"""Reads and checks the header of a GGUF file, whole or split into parts: metadata and tensor locations."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

MAX_PARTS = 1000
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
STRING, ARRAY = 8, 9
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """Tensor of type `kind`, rows [N, K] or [K], at byte `offset` of a file of `file_bytes`."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    path: Path
    file_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Tensors, and metadata of the file or its first part; long arrays are replaced by their length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def find_gguf(directory: Path) -> Path | None:
    """Return a folder's .gguf file, the first of its parts, or None. Raises ModelError if there are several files."""
    found = sorted(path for path in directory.glob("*.gguf"))
    if len(found) > 1 and not are_parts([path.name for path in found]):
        raise ModelError(f"{directory}: {len(found)} .gguf files are there (1, or all parts of one)")
    return found[0] if found else None


def are_parts(names: Sequence[str]) -> bool:
    """Return whether these are all parts of one file in order: NAME-00001-of-00002.gguf and so on."""
    found = _PART.fullmatch(names[0])
    return found is not None and list(names) == _part_names(found[1], len(names))


def _part_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]


def read_gguf(path: Path) -> GgufHeader:
    """Read and check the header, including those of other parts. Raises ModelError."""
    header = _read_part(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    found = _PART.fullmatch(path.name)
    if found is None or type(count) is not int or not 0 < count <= MAX_PARTS:
        raise ModelError(f"{path}: split.count: {str(count)[:40]} parts, but the name is not NAME-00001-of-00002.gguf")
    tensors: dict[str, GgufTensor] = {}
    for name in _part_names(found[1], count):
        part = header if name == path.name else _read_part(path.with_name(name))
        if both := tensors.keys() & part.tensors.keys():
            raise ModelError(f"{part.path}: tensor {min(both)[:100]!r}: is in another part too")
        tensors |= part.tensors
    return replace(header, tensors=tensors)


def _read_part(path: Path) -> GgufHeader:
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
        moved = {tensor.name: replace(tensor, offset=begin + tensor.offset) for tensor in tensors}
        return GgufHeader(self._path, metadata, moved)

    def _tensor(self) -> GgufTensor:
        name, num_dimensions = self._string(), self._scalar(4)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name[:100]!r}: has {num_dimensions} dimensions")
        sizes = [self._scalar(10) for _ in range(num_dimensions)]
        if any(not 1 <= size <= MAX_DIMENSION for size in sizes) or math.prod(sizes) > MAX_DIMENSION:
            raise self._error(f"tensor {name[:100]!r}: shape {sizes} is not supported")
        kind, offset = self._scalar(4), self._scalar(10)
        return GgufTensor(name, kind, tuple(reversed(sizes)), offset, self._path, self._num_bytes)

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
