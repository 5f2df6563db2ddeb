"""Codes with group scales, as INT4 (equal groups), INT8 (row scales) or DENSE."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.ops.weight import WeightFormat
from model.weights.formats.stored_matrix import (
    FLOAT32,
    ConvertedRows,
    ReadRows,
    Rows,
    StoredMatrix,
    WeightForm,
    dense_matrix,
)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack uint8[n, K] of 0..15 into uint8[n, K / 2], even elements in the low half."""
    packed: np.ndarray = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8[n, K / 2] to uint8[n, K] of 0..15."""
    codes = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    return codes


def word_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32[n, w] to uint8[n, w * 32 / bits], low bits first."""
    packed = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return packed if bits == 8 else unpack_nibbles(packed)


@dataclass(frozen=True)
class GroupedIntegers:
    """Matrix (codes - zeros) * scales, one zero and scale per row and `group_size` inputs."""

    module: str
    shape: tuple[int, int]
    bits: int
    group_size: int  # 1..K
    scale_dtype: np.dtype
    codes: ReadRows  # -> uint8[n, K], in input order
    scales: ReadRows  # -> `scale_dtype` [n, ceil(K / group_size)], checked
    zeros: ReadRows | None  # -> uint8, the same shape; None: 2^(bits - 1)
    packed: ReadRows | None = None  # -> uint8[n, K / 2], faster for 4 bits
    group_of: np.ndarray | None = None  # int32[K], each input's group; None: k // group_size

    def stored_matrix(self) -> StoredMatrix:
        num_inputs = self.shape[1]
        if self.bits == 4 and num_inputs % 8 == 0 and num_inputs % self.group_size == 0 and self.group_size % 2 == 0:
            return self._int4()
        if self.bits == 8 and self.group_size == num_inputs and self.zeros is None and self.group_of is None:
            return self._int8()
        return dense_matrix(self.module, self.shape, self._dequantised)

    def _int4(self) -> StoredMatrix:
        num_inputs = self.shape[1]
        order = None if self.group_of is None else np.argsort(self.group_of, kind="stable").astype(np.int32)
        num_groups = num_inputs // self.group_size
        arrays: dict[str, Rows] = {
            "data": ConvertedRows(num_inputs // 2, self._packed_rows(order)),
            "scale": ConvertedRows(num_groups, self.scales),
        }
        if self.zeros is not None:
            arrays["zero_point"] = ConvertedRows(num_groups, self.zeros)
        form = WeightForm(
            WeightFormat.INT4,
            group_size=self.group_size,
            scale_dtype=self.scale_dtype,
            has_zero_point=self.zeros is not None,
            has_input_order=order is not None,
        )
        return StoredMatrix(self.module, self.shape, form, arrays, order)

    def _packed_rows(self, order: np.ndarray | None) -> ReadRows:
        if order is None:
            return self.packed or (lambda first, last: pack_nibbles(self.codes(first, last)))
        return lambda first, last: pack_nibbles(self.codes(first, last)[:, order])

    def _int8(self) -> StoredMatrix:
        arrays: dict[str, Rows] = {
            "data": ConvertedRows(self.shape[1], lambda first, last: (self.codes(first, last) ^ 0x80).view(np.int8)),
            "scale": ConvertedRows(1, lambda first, last: self.scales(first, last).astype(FLOAT32)),
        }
        return StoredMatrix(self.module, self.shape, WeightForm(WeightFormat.INT8, scale_dtype=FLOAT32), arrays)

    def _dequantised(self, first: int, last: int) -> np.ndarray:
        group_of = np.arange(self.shape[1]) // self.group_size if self.group_of is None else self.group_of
        values = self.codes(first, last).astype(FLOAT32)
        if self.zeros is None:
            values -= np.float32(1 << (self.bits - 1))
        else:
            values -= self.zeros(first, last).astype(FLOAT32)[:, group_of]
        values *= self.scales(first, last).astype(FLOAT32)[:, group_of]
        return values
