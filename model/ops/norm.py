"""A norm and the product that reads it, one after the other."""

from __future__ import annotations

from model.ops.interface import Array, Ops
from model.ops.weight import Weight


def add_norm_linear(
    ops: Ops,
    sums: tuple[Array, Array],
    norm: tuple[Array, float],
    product: tuple[Weight, Array | None],
    out: Array | None,
) -> Array:
    """Implement `Ops.add_norm_linear`; `sums` is (x, residual), `norm` (weight, eps), `product` (weight, bias)."""
    return ops.linear(ops.add_rms_norm(*sums, *norm), *product, out=out)
