"""Stored matrix, read row by row in a form of `Weight`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.ops.fp8 import E4M3
from model.ops.weight import WeightFormat
from model.weights.safetensors_file import DTYPE_WORDS, FLOAT_DTYPES, StoredTensor

FLOAT32 = np.dtype(np.float32)
FLOATS = tuple(FLOAT_DTYPES.values())
FP8 = (E4M3,)
INT8, INT32, INT64, UINT8 = ((np.dtype(name),) for name in ("int8", "int32", "int64", "uint8"))
E8M0 = (np.dtype(ml_dtypes.float8_e8m0fnu),)

SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))

BLOCK = 128
"""Rows and columns of a WeightFormat.FP8_BLOCK block."""

ReadRows = Callable[[int, int], np.ndarray]
"""Reads rows first..last - 1."""


@dataclass(frozen=True)
class WeightForm:
    """Properties shared by all parts of a stacked `Weight`."""

    format: WeightFormat = WeightFormat.DENSE
    group_size: int = 0
    scale_dtype: np.dtype | None = None  # as stored; float32 except for INT4
    has_zero_point: bool = False
    quantised_input: bool = False
    has_input_order: bool = False

    def arrays(self, num_outputs: int, num_inputs: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return (shape, dtype) of each array of a `Weight` [N, K]; not for DENSE."""
        if self.format is WeightFormat.INT4:
            groups = (num_outputs, num_inputs // self.group_size)
            arrays = {
                "data": ((num_outputs, num_inputs // 2), UINT8[0]),
                "scale": (groups, self.scale_dtype or FLOAT32),
            }
            return arrays | ({"zero_point": (groups, UINT8[0])} if self.has_zero_point else {})
        data = ((num_outputs, num_inputs), (INT8 if self.format is WeightFormat.INT8 else UINT8)[0])
        if self.format is WeightFormat.FP8_BLOCK:
            return {"data": data, "scale": ((-(-num_outputs // BLOCK), -(-num_inputs // BLOCK)), FLOAT32)}
        return {"data": data, "scale": ((num_outputs,), FLOAT32)}

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the bytes of a `Weight` [N, K]; not for DENSE."""
        arrays = self.arrays(num_outputs, num_inputs).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


class Rows(Protocol):
    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill contiguous `out` with the flattened array from element `start` on. Thread-safe. Raises ModelError."""


@dataclass(frozen=True)
class CopiedRows:
    """Elements used as stored; the dtypes have equal size."""

    tensor: StoredTensor

    def read_into(self, start: int, out: np.ndarray) -> None:
        self.tensor.read_into(start, out)


@dataclass(frozen=True)
class ConvertedRows:
    width: int
    convert: ReadRows

    def read_into(self, start: int, out: np.ndarray) -> None:
        first, last = start // self.width, -(-(start + out.size) // self.width)
        values = self.convert(first, last).reshape(-1)
        begin = start - first * self.width
        with np.errstate(over="ignore", invalid="ignore"):
            out.reshape(-1)[...] = values[begin : begin + out.size]


@dataclass(frozen=True)
class StoredMatrix:
    """Projection [N, K]. `arrays` holds data, plus scale and zero_point if the form has them."""

    name: str  # the module's name in the files
    shape: tuple[int, int]
    form: WeightForm
    arrays: dict[str, Rows]
    input_order: np.ndarray | None = field(default=None)  # int32[K]
    e4m3: StoredTensor | None = None  # data in e4m3, possibly with NaN


def equally_ordered(parts: Sequence[StoredMatrix]) -> list[StoredMatrix]:
    """Give parts without an input order the identity order if others have one: GPTQ rounds some experts without it."""
    if not any(part.form.has_input_order for part in parts):
        return list(parts)
    return [
        part
        if part.form.has_input_order or part.form.format is not WeightFormat.INT4
        else replace(
            part,
            form=replace(part.form, has_input_order=True),
            input_order=np.arange(part.shape[1], dtype=np.int32),
        )
        for part in parts
    ]


def check_stackable(parts: Sequence[StoredMatrix]) -> None:
    """Raise ModelError unless matrices with one input, hence one GPTQ order, can share a `Weight`."""
    first = parts[0]
    for part in parts[1:]:
        if part.form != first.form:
            raise ModelError(f"{first.name} and {part.name}: are in two formats, but share an input")
        if first.input_order is None or part.input_order is None:
            continue
        if not np.array_equal(first.input_order, part.input_order):
            raise ModelError(f"{first.name} and {part.name}: g_idx differs, but they share an input")
    for part in parts[:-1]:
        if part.form.format is WeightFormat.FP8_BLOCK and part.shape[0] % BLOCK:
            raise ModelError(
                f"{part.name}: {part.shape[0]} rows are no multiple of {BLOCK}, so blocks cannot be stacked"
            )


class Scheme(Protocol):
    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        """Check the tensors' names, dtypes and shapes, not their values. Raises ModelError."""


class ModuleTensors:
    """Tensors of one module by suffix, each returned once."""

    def __init__(self, module: str, where: str, tensors: dict[str, StoredTensor]):
        self.module = module
        self._where = where
        self._tensors = dict(tensors)

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(suffix)
        return None if tensor is None else tensor.shape

    def take(self, suffix: str, dtypes: Collection[np.dtype], *shapes: tuple[int, ...]) -> StoredTensor:
        """Return a tensor with one of `dtypes` and `shapes`. Raises ModelError."""
        tensor = self._tensors.pop(suffix, None)
        if tensor is None:
            raise ModelError(f"{self._where}: tensor '{self.module}.{suffix}': missing")
        if tensor.dtype not in dtypes:
            allowed = ", ".join(DTYPE_WORDS[dtype] for dtype in dtypes)
            raise tensor.error(f"dtype is {DTYPE_WORDS[tensor.dtype]} (allowed: {allowed})")
        if tensor.shape not in shapes:
            raise tensor.error(f"shape is {list(tensor.shape)} (allowed: {' or '.join(str(list(s)) for s in shapes)})")
        return tensor

    def take_scalar(self, suffix: str) -> np.float32:
        """Return the matrix's scale, finite and positive. Raises ModelError."""
        tensor = self.take(suffix, FLOATS, *SCALAR_SHAPES)
        values = tensor.values().reshape(-1).astype(FLOAT32)
        check_scales(tensor, values)
        return np.float32(values[0])

    def finish(self) -> None:
        """Raise ModelError for a tensor left over."""
        for suffix, tensor in sorted(self._tensors.items()):
            raise tensor.error(f"{suffix} is no part of this format")


def check_scales(tensor: StoredTensor, values: np.ndarray, *, zero_allowed: bool = False) -> None:
    """Raise ModelError unless finite and positive (or zero, if allowed)."""
    if not np.isfinite(values).all():
        raise tensor.error("holds NaN or infinity")
    if values.size and not (values.min() >= 0 if zero_allowed else values.min() > 0):
        raise tensor.error(f"holds a scale that is {'negative' if zero_allowed else 'zero or negative'}")


def read_scales(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
    values = tensor.rows(first, last).astype(FLOAT32)
    check_scales(tensor, values)
    return values


def row_scales(tensor: StoredTensor) -> ConvertedRows:
    """Read [N] or [N, 1] as float32."""
    return ConvertedRows(1, lambda first, last: read_scales(tensor, first, last))


def constant_scale(value: np.float32) -> ConvertedRows:
    """Repeat a matrix's scale per row, so that stacking needs no requantising."""
    return ConvertedRows(1, lambda first, last: np.full(last - first, value, FLOAT32))


def dense_matrix(module: str, shape: tuple[int, int], convert: ReadRows) -> StoredMatrix:
    """Dequantise while reading; `convert` returns float32 rows [n, K]."""
    return StoredMatrix(module, shape, WeightForm(), {"data": ConvertedRows(shape[1], convert)})
