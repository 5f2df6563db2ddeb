"""Folding of family differences into weights while they are read.

Partial or interleaved rope: kernels rotate element i with i + D / 2; reordering q's and k's rows alike keeps their
products. Multipliers: the residual stream is divided by its own multiplier, which the norms' epsilon and the embedding
compensate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.weight import WeightFormat
from model.weights.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD
from model.weights.formats.stored_matrix import BLOCK, StoredMatrix

ReadInto = Callable[[int, np.ndarray], None]


class TensorSource(Protocol):
    """Tensors by their names in the files."""

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out` [n], in its dtype, from element `start` on. Raises ModelError."""

    def matrix(self, name: str) -> StoredMatrix | None:
        """Return the quantised matrix; None if the tensor is dense. Raises ModelError."""

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        """Return the error for a tensor with NaN or infinity in `dtype`."""


def folded(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Return `source` with the differences of `config` folded in."""
    factors = {EMBEDDING: config.embedding_factor, FINAL_NORM: 1 / config.multipliers.logits_divisor}
    factors = {name: factor for name, factor in factors.items() if factor != 1}
    orders = row_orders(config)
    return FoldedSource(source, config, factors, orders) if factors or orders else source


class FoldedSource:
    def __init__(
        self, source: TensorSource, config: ModelConfig, factors: dict[str, float], orders: dict[str, np.ndarray]
    ):
        """Multiply tensors by `factors`; a layer's row i is read from row orders[module][i]."""
        self._source = source
        self._factors = factors
        self._orders = orders
        self._width = config.hidden_size
        self._head = EMBEDDING if config.tied_embeddings else LM_HEAD

    def matrix(self, name: str) -> StoredMatrix | None:
        matrix, order = self._source.matrix(name), self._order(name)
        return matrix if matrix is None or order is None else _reordered(matrix, order)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        stored = self._head if name == LM_HEAD else name
        order = self._order(name)
        if order is None:
            self._source.read_into(stored, start, out)
        else:
            width = self._width if name.endswith("weight") else 1
            _ReorderedRows(partial(self._source.read_into, stored), order, width).read_into(start, out)
        if name in self._factors:
            out[...] = out.astype(np.float32) * np.float32(self._factors[name])

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        return self._source.nonfinite(self._head if name == LM_HEAD else name, dtype)

    def _order(self, name: str) -> np.ndarray | None:
        module = name.rpartition(".")[0].partition(".layers.")[2].partition(".")[2]
        return self._orders.get(module)


@dataclass(frozen=True)
class _ReorderedRows:
    """Rows order[0], order[1], ... of a matrix."""

    read: ReadInto
    order: np.ndarray
    width: int

    def read_into(self, start: int, out: np.ndarray) -> None:
        flat, done = out.reshape(-1), 0
        run_ends = np.append(np.flatnonzero(np.diff(self.order) != 1) + 1, len(self.order))
        while done < flat.size:
            row, column = divmod(start + done, self.width)
            end = int(run_ends[np.searchsorted(run_ends, row, side="right")])
            count = min((end - row) * self.width - column, flat.size - done)
            self.read(int(self.order[row]) * self.width + column, flat[done : done + count])
            done += count


def _reordered(matrix: StoredMatrix, order: np.ndarray) -> StoredMatrix:
    keeps_blocks = np.array_equal(order // BLOCK, np.arange(len(order)) // BLOCK)
    if matrix.form.format is WeightFormat.FP8_BLOCK and not keeps_blocks:
        raise ModelError(f"{matrix.name}: a rope of part of a head needs heads of {BLOCK} rows in fp8 blocks")
    arrays = dict(matrix.arrays)
    for name, (shape, _) in matrix.form.arrays(*matrix.shape).items():
        if shape[0] == len(order):
            width = 1 if len(shape) == 1 else shape[1]
            arrays[name] = _ReorderedRows(matrix.arrays[name].read_into, order, width)
    return replace(matrix, arrays=arrays)


def row_orders(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the row order of each q, k and v module; {} if kernels rotate heads as stored."""
    rotary = config.rope.rotary_dim(config.head_dim)
    if rotary == config.head_dim and not config.rope.is_interleaved:
        return {}
    rotating, rest = np.split(np.arange(config.head_dim), [rotary])
    first, second = rotating.reshape(-1, 2).T if config.rope.is_interleaved else rotating.reshape(2, -1)
    middle = len(rest) // 2
    head = np.concatenate([first, rest[:middle], second, rest[middle:]])
    num_rotated = config.num_heads + config.num_kv_heads
    rotated = (np.arange(num_rotated)[:, None] * config.head_dim + head).reshape(-1)
    values = np.arange(num_rotated * config.head_dim, (num_rotated + config.num_kv_heads) * config.head_dim)
    whole, borders = np.concatenate([rotated, values]), [config.num_heads * config.head_dim, len(rotated)]
    modules = config.tensors.qkv
    if len(modules) == 1:
        return {modules[0]: whole}
    return {name: part - part.min() for name, part in zip(modules, np.split(whole, borders), strict=True)}
