"""Registry of quantisation methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model.config_fields import Fields
from model.weights.formats.awq import read_awq
from model.weights.formats.compressed_tensors import read_compressed_tensors
from model.weights.formats.fp8 import read_fp8
from model.weights.formats.gptq import read_gptq
from model.weights.formats.method import find_method
from model.weights.formats.modelopt import read_modelopt
from model.weights.formats.nf4 import read_bitsandbytes
from model.weights.formats.quantisation import Quantisation

METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "gptq": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
}
"""Readers by `quant_method`."""


def read_quantisation(directory: Path) -> Quantisation | None:
    """Read config.json or an older file; None for 16- or 32-bit weights. Raises ModelError."""
    found = find_method(directory)
    if found is None:
        return None
    method, section = found
    if method not in METHODS:
        raise section.error("quant_method", f"{method!r} is not supported ({', '.join(METHODS)})")
    return METHODS[method](section)
