"""The quantised modules of a checkpoint, by its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.weights.formats.stored_matrix import Scheme


@dataclass(frozen=True)
class Quantisation:
    """The scheme of each module, by its name in the files."""

    label: str  # for logs and `quire check`: "compressed-tensors float-quantized"
    source: str  # file and field that say so
    skip_field: str  # field that lists modules left in 16 bits
    scheme_of: Callable[[str], Scheme | None]  # None: not quantised
    head_may_be_dense: bool = False  # the method leaves lm_head as it is without saying so
