"""`--quantization fp8`: 16-bit matrices are rounded to e4m3 on the device during loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.group.arrays import Split, divided, each_rank, stacked
from model.ops.interface import Array, Fp8Rows, Ops
from model.ops.weight import Weight
from model.weights.checkpoint import PartShape, is_projection, loaded_shapes

STAGING_BYTES = 1 << 30
"""Device memory for unrounded matrices, unless one is larger."""

ReadInto = Callable[[str, int, np.ndarray], None]
"""Type of `TensorSource.read_into`."""


def loaded_bytes(
    config: ModelConfig, dtype: np.dtype, quantization: str, part_shape: PartShape = lambda name, shape: shape
) -> dict[str, int]:
    """Return each weight's bytes; with "fp8", layers' matrices are e4m3 with row scales. part_shape(name, shape) is a
    rank's part."""
    num_bytes = {}
    for name, whole in loaded_shapes(config).items():
        shape = part_shape(name, whole)
        if quantization == "fp8" and is_layer_matrix(name, shape):
            num_bytes[name] = math.prod(shape) + 4 * shape[0]
        else:
            num_bytes[name] = math.prod(shape) * np.dtype(dtype).itemsize
    return num_bytes


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return True if a tensor is quantised online: embedding, lm_head and routers are not."""
    return name.startswith("model.layers.") and len(shape) == 2 and is_projection(name)


@dataclass(frozen=True)
class _Matrix:
    weight: Weight
    names: Sequence[str]
    ends: Sequence[int]  # rows where each tensor ends
    splits: Sequence[Split | None]

    @property
    def size(self) -> int:
        return math.prod(self.weight.shape)


class OnlineFp8:
    def __init__(self, ops: Ops):
        self._ops = ops
        self._matrices: list[_Matrix] = []

    @property
    def num_source_bytes(self) -> int:
        return sum(matrix.size for matrix in self._matrices) * self._ops.dtype.itemsize

    def matrix(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], splits: Sequence[Split | None]) -> Weight:
        """Allocate one matrix for tensors [n, K], stacked along the first axis. A rank's part of a row has its own
        scale."""
        weight = self._stack([names], shapes, splits).expert(0)
        return replace(weight, data=divided(weight.data, stacked(splits)))

    def experts(
        self, names: Sequence[Sequence[str]], shapes: Sequence[tuple[int, ...]], splits: Sequence[Split | None]
    ) -> Weight:
        """Allocate a stack with one matrix of these tensors [n, K] per expert."""
        weight = self._stack(names, shapes, splits)
        return replace(weight, data=divided(weight.data, stacked(splits)))

    def _stack(
        self, names: Sequence[Sequence[str]], shapes: Sequence[tuple[int, ...]], splits: Sequence[Split | None]
    ) -> Weight:
        ends = np.cumsum([shape[0] for shape in shapes]).tolist()
        data = self._ops.empty((len(names), ends[-1], shapes[0][1]), np.dtype(np.uint8))
        weight = Weight.fp8(data, self._ops.empty((len(names), ends[-1]), np.dtype(np.float32)))
        self._matrices += [_Matrix(weight.expert(index), own, ends, splits) for index, own in enumerate(names)]
        return weight

    def fill(self, read_into: ReadInto, nonfinite: Callable[[str, np.dtype], ModelError]) -> None:
        """Read and round all matrices. Raises ModelError for a tensor with NaN or infinity."""
        itemsize = self._ops.dtype.itemsize
        groups = list(_groups(self._matrices, STAGING_BYTES // itemsize))
        largest = max((sum(matrix.size for matrix in group) for group in groups), default=0)
        staging = self._ops.empty((largest,), self._ops.dtype)
        for group in groups:
            self._fill_group(group, staging, read_into, nonfinite)

    def _fill_group(
        self,
        group: Sequence[_Matrix],
        staging: Array,
        read_into: ReadInto,
        nonfinite: Callable[[str, np.dtype], ModelError],
    ) -> None:
        ops = self._ops
        ends = np.cumsum([0] + [matrix.size for matrix in group]).tolist()
        views = [staging[begin:end] for begin, end in pairwise(ends)]
        views = [view.reshape(matrix.weight.shape) for view, matrix in zip(views, group, strict=True)]
        names = [name for matrix in group for name in matrix.names]
        parts = [
            divided(view[begin:end], split)
            for view, matrix in zip(views, group, strict=True)
            for (begin, end), split in zip(pairwise([0, *matrix.ends]), matrix.splits, strict=True)
        ]
        ops.load_parallel(parts, lambda target, start, out: read_into(names[target], start, out))
        found = ops.upload(np.zeros(len(parts), np.int32))
        for index, part in enumerate(parts):
            ops.find_nonfinite(part, found[index : index + 1])
        on_any_rank = ops.download(each_rank(found)).reshape(-1, len(parts)).any(axis=0)
        for index in np.flatnonzero(on_any_rank).tolist():
            raise nonfinite(names[index], ops.dtype)
        for view, matrix in zip(views, group, strict=True):
            ops.quantise_rows(view, Fp8Rows(matrix.weight.data, matrix.weight.scale))
        ops.synchronize()


def _groups(matrices: Sequence[_Matrix], max_size: int) -> Iterator[list[_Matrix]]:
    """Yield runs of at most `max_size` elements, or one larger matrix."""
    group: list[_Matrix] = []
    for matrix in matrices:
        if group and sum(each.size for each in group) + matrix.size > max_size:
            yield group
            group = []
        group.append(matrix)
    if group:
        yield group
