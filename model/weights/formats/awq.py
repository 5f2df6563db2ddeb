"""AWQ: 4-bit codes and zero points, interleaved in words along the outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from model.config_fields import Fields
from model.weights.formats import patterns
from model.weights.formats.integers import GroupedIntegers, pack_nibbles
from model.weights.formats.quantisation import Quantisation
from model.weights.formats.stored_matrix import (
    FLOAT32,
    FLOATS,
    INT32,
    ModuleTensors,
    Scheme,
    StoredMatrix,
    check_scales,
)
from model.weights.safetensors_file import StoredTensor

PER_WORD = 8
SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.int32)
"""Bit offset of each output in a word: nibbles 0, 4, 1, 5, 2, 6, 3, 7."""


@dataclass(frozen=True)
class AwqScheme:
    """`version: "gemm"`; activation scaling is folded into other weights."""

    group_size: int  # 0: the whole row
    has_zero_point: bool

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        num_outputs, num_inputs = shape
        group_size = self.group_size or num_inputs
        num_groups = -(-num_inputs // group_size)
        num_words = -(-num_outputs // PER_WORD)
        words = tensors.take("qweight", INT32, (num_inputs, num_words))
        scale = tensors.take("scales", FLOATS, (num_groups, num_outputs))
        has_zeros = self.has_zero_point or "qzeros" in tensors  # GPTQModel stores the midpoint if the config has none
        zeros = tensors.take("qzeros", INT32, (num_groups, num_words)) if has_zeros else None

        def scales(first: int, last: int) -> np.ndarray:
            values = np.ascontiguousarray(scale.columns(first, last).T)
            check_scales(scale, values.astype(FLOAT32))
            return values

        return GroupedIntegers(
            tensors.module,
            shape,
            4,
            group_size,
            scale.dtype,
            codes=lambda first, last: _outputs(words, first, last).T,
            scales=scales,
            zeros=None if zeros is None else (lambda first, last: _outputs(zeros, first, last).T),
            packed=lambda first, last: np.ascontiguousarray(pack_nibbles(_outputs(words, first, last).T)),
        ).stored_matrix()


def read_awq(fields: Fields) -> Quantisation:
    """Read `quant_method: "awq"`, or an old quant_config.json. Raises ModelError."""
    for name in ("version", "checkpoint_format", "format"):
        if (value := fields.text(name, "gemm").lower()) != "gemm":
            raise fields.error(name, f"{value!r} is not supported (gemm)")
    scheme = _changed(AwqScheme(128, fields.boolean("zero_point", True)), fields)
    names = patterns.entries(fields, "modules_to_not_convert")
    is_named = patterns.name_parts(names)
    overrides = [
        (matches, None if own is None else _changed(scheme, own)) for matches, own in patterns.dynamic_overrides(fields)
    ]

    def scheme_of(module: str) -> Scheme | None:
        if is_named(module):
            return None
        return next((override for matches, override in overrides if matches(module)), scheme)

    return Quantisation(
        label="awq 4 bits",
        source=fields.source,
        skip_field="modules_to_not_convert" if names else "dynamic",
        scheme_of=scheme_of,
        may_be_dense=lambda module: module == "lm_head" or any(name in module for name in names),
    )


def _changed(scheme: AwqScheme, fields: Fields) -> AwqScheme:
    """Return `scheme` with its group size from `fields`. Raises ModelError."""
    bits = fields.integer("bits", fields.integer("w_bit", 4, high=16), high=16)
    if bits != 4:
        raise fields.error("bits", f"{bits} is not supported (4)")
    default = fields.integer("q_group_size", scheme.group_size or -1, low=-1, high=1 << 20)
    group_size = fields.integer("group_size", default, low=-1, high=1 << 20)
    if group_size == 0:
        raise fields.error("group_size", "0 is not supported (-1, or at least 1)")
    return replace(scheme, group_size=max(group_size, 0))


def _outputs(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
    """Return outputs first..last - 1 of words [R, N / 8], uint8[R, last - first]."""
    begin = first // PER_WORD
    words = tensor.columns(begin, -(-last // PER_WORD))
    codes = ((words[:, :, None] >> SHIFTS) & 15).astype(np.uint8).reshape(len(words), -1)
    return codes[:, first - begin * PER_WORD : last - begin * PER_WORD]
