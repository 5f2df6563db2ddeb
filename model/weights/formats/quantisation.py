"""Quantised modules of a checkpoint, from its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.weights.formats.stored_matrix import Scheme


@dataclass(frozen=True)
class Quantisation:
    label: str  # "compressed-tensors float-quantized"
    source: str  # file and field
    skip_field: str  # lists modules left in 16 bits
    scheme_of: Callable[[str], Scheme | None]  # None: not quantised
    may_be_dense: Callable[[str], bool] = lambda module: False  # despite a scheme from `scheme_of`
