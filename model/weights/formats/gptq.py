"""GPTQ: codes in words along the inputs, zero points in words along the outputs, both low bits first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from model.config_fields import Fields
from model.weights.formats import patterns
from model.weights.formats.integers import GroupedIntegers, word_codes
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

log = logging.getLogger("quire.weights")

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Added to a stored zero point. v1 wraps: a stored 15 means 0, as in AutoGPTQ."""


@dataclass(frozen=True)
class GptqScheme:
    """`reorders`: inputs may be grouped by `g_idx` (desc_act)."""

    bits: int
    group_size: int  # 0: the whole row
    symmetric: bool
    reorders: bool
    zero_offset: int

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        num_outputs, num_inputs = shape
        per_word = 32 // self.bits
        group_size = min(self.group_size or num_inputs, num_inputs)
        num_groups = -(-num_inputs // group_size)
        words = tensors.take("qweight", INT32, (-(-num_inputs // per_word), num_outputs))
        scale = tensors.take("scales", FLOATS, (num_groups, num_outputs))
        zeros = tensors.take("qzeros", INT32, (num_groups, -(-num_outputs // per_word)))
        group_of = tensors.take("g_idx", INT32, (num_inputs,)) if "g_idx" in tensors else None

        def packed(first: int, last: int) -> np.ndarray:
            return np.ascontiguousarray(words.columns(first, last).T).view(np.uint8)

        def scales(first: int, last: int) -> np.ndarray:
            values = np.ascontiguousarray(scale.columns(first, last).T)
            check_scales(scale, values.astype(FLOAT32))
            return values

        return GroupedIntegers(
            tensors.module,
            shape,
            self.bits,
            group_size,
            scale.dtype,
            codes=lambda first, last: word_codes(words.columns(first, last).T, self.bits)[:, :num_inputs],
            scales=scales,
            zeros=self._zeros(zeros, num_outputs),
            packed=packed,
            group_of=None if group_of is None else self._groups(group_of, group_size),
        ).stored_matrix()

    def _zeros(self, tensor: StoredTensor, num_outputs: int) -> Callable[[int, int], np.ndarray] | None:
        stored = word_codes(tensor.values(), self.bits)[:, :num_outputs]
        largest = (1 << self.bits) - 1
        zeros = (stored + np.uint8(self.zero_offset)) & np.uint8(largest)  # wraps in uint8 for 8 bits
        if self.symmetric:
            middle = 1 << (self.bits - 1)
            if (zeros != middle).any():
                raise tensor.error(f"holds a zero point other than {middle}, but the config says sym")
            return None
        if self.zero_offset and (stored == largest).any():
            log.warning("%s holds zero points stored as %d, read as 0", tensor.name, largest)
        by_output = np.ascontiguousarray(zeros.T)
        return lambda first, last: by_output[first:last]

    def _groups(self, tensor: StoredTensor, group_size: int) -> np.ndarray | None:
        """Return each input's group; None if it is the index divided by the group size."""
        groups = tensor.values()
        expected = np.arange(len(groups), dtype=np.int32) // group_size
        if (groups == expected).all():
            return None
        if (np.sort(groups) != expected).any():
            raise tensor.error(f"is no order of groups of {group_size} inputs")
        if not self.reorders:
            raise tensor.error("reorders the inputs, but the config says desc_act false")
        return groups


def read_gptq(fields: Fields) -> Quantisation:
    """Read `quant_method: "gptq"`, or an old quantize_config.json. Raises ModelError."""
    if fields.boolean("is_marlin_format", False):
        raise fields.error("is_marlin_format", "true is not supported")
    if (pack_dtype := fields.text("pack_dtype", "int32")) != "int32":
        raise fields.error("pack_dtype", f"{pack_dtype!r} is not supported (int32)")
    format = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if format not in ZERO_OFFSETS:
        raise fields.error("checkpoint_format", f"{format!r} is not supported ({', '.join(ZERO_OFFSETS)})")
    scheme = GptqScheme(
        bits=_bits(fields),
        group_size=_group_size(fields),
        symmetric=fields.boolean("sym", True),
        reorders=fields.boolean("desc_act", False),
        zero_offset=ZERO_OFFSETS[format],
    )
    overrides = [
        (matches, None if own is None else _changed(scheme, own)) for matches, own in patterns.dynamic_overrides(fields)
    ]
    only = _listed_modules(fields)
    has_head = fields.boolean("lm_head", False)

    def scheme_of(module: str) -> Scheme | None:
        if module == "lm_head" and not has_head:
            return None
        if only is not None and module != "lm_head" and not only(module):
            return None
        return next((override for matches, override in overrides if matches(module)), scheme)

    return Quantisation(
        label=f"{format} {scheme.bits} bits" + (", desc_act" if scheme.reorders else ""),
        source=fields.source,
        skip_field="modules_in_block_to_quantize" if only is not None else "dynamic",
        scheme_of=scheme_of,
    )


def _bits(fields: Fields) -> int:
    if (bits := fields.integer("bits", high=16)) not in (4, 8):
        raise fields.error("bits", f"{bits} is not supported (4, 8)")
    return int(bits)


def _group_size(fields: Fields) -> int:
    size = fields.integer("group_size", -1, low=-1, high=1 << 20)
    if size == 0:
        raise fields.error("group_size", "0 is not supported (-1, or at least 1)")
    return max(int(size), 0)


def _changed(scheme: GptqScheme, own: Fields) -> GptqScheme:
    return replace(
        scheme,
        bits=scheme.bits if own.get("bits") is None else _bits(own),
        group_size=scheme.group_size if own.get("group_size") is None else _group_size(own),
        symmetric=own.boolean("sym", scheme.symmetric),
        reorders=own.boolean("desc_act", scheme.reorders),
    )


def _listed_modules(fields: Fields) -> patterns.Matches | None:
    """Read `modules_in_block_to_quantize`, a list of lists of names."""
    value = fields.get("modules_in_block_to_quantize")
    if value is None:
        return None
    lists = value if isinstance(value, list) else [None]
    flat = [name for names in lists for name in (names if isinstance(names, list) else [names])]
    flat_fields = Fields({"modules_in_block_to_quantize": flat}, fields.source)
    return patterns.name_parts(patterns.entries(flat_fields, "modules_in_block_to_quantize"))
