"""`quant_method: "compressed-tensors"`: FP8, INT8, packed INT4 and INT8, NVFP4 and MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.config_fields import Fields
from model.ops.weight import WeightFormat
from model.weights.formats import patterns
from model.weights.formats.fp4 import Mxfp4Scheme, Nvfp4Scheme
from model.weights.formats.fp8 import Fp8BlockScheme, Fp8Scheme
from model.weights.formats.integers import GroupedIntegers, word_codes
from model.weights.formats.quantisation import Quantisation
from model.weights.formats.stored_matrix import (
    BLOCK,
    FLOAT32,
    FLOATS,
    INT8,
    INT32,
    INT64,
    SCALAR_SHAPES,
    CopiedRows,
    ModuleTensors,
    Scheme,
    StoredMatrix,
    WeightForm,
    check_scales,
    constant_scale,
    row_scales,
)
from model.weights.safetensors_file import StoredTensor

UNPACKED = ("float-quantized", "int-quantized", "naive-quantized")
PACKED = "pack-quantized"
FP4_FORMATS = {"nvfp4-pack-quantized": "tensor_group", "mxfp4-pack-quantized": "group"}
FORMATS = (*UNPACKED, PACKED, *FP4_FORMATS)
MIXED = "mixed-precision"
BLOCK_STRUCTURES = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
MAX_GROUPS = 64


@dataclass(frozen=True)
class Arguments:
    """Quantisation of weights or of input activations."""

    num_bits: int
    kind: str  # "int" | "float"
    symmetric: bool
    strategy: str
    group_size: int
    is_dynamic: bool
    fields: Fields


@dataclass(frozen=True)
class Int8Scheme:
    """int8 weights with one scale per matrix or row."""

    quantised_input: bool

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        weight = tensors.take("weight", INT8, shape)
        if "input_scale" in tensors:
            tensors.take_scalar("input_scale")
        _take_zeros(tensors, "weight_zero_point")
        if tensors.shape("weight_scale") in SCALAR_SHAPES:
            scale = constant_scale(tensors.take_scalar("weight_scale"))
        else:
            scale = row_scales(tensors.take("weight_scale", FLOATS, (shape[0],), (shape[0], 1)))
        form = WeightForm(WeightFormat.INT8, scale_dtype=FLOAT32, quantised_input=self.quantised_input)
        return StoredMatrix(tensors.module, shape, form, {"data": CopiedRows(weight), "scale": scale})


@dataclass(frozen=True)
class PackedScheme:
    """Codes in 32-bit words along the inputs, low bits first; zero points in words along the outputs."""

    bits: int
    group_size: int  # 0: the whole row
    symmetric: bool

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        num_outputs, num_inputs = shape
        per_word = 32 // self.bits
        group_size = self.group_size or num_inputs
        num_groups = -(-num_inputs // group_size)
        words = tensors.take("weight_packed", INT32, (num_outputs, -(-num_inputs // per_word)))
        stored_shape = tensors.take("weight_shape", INT64 + INT32, (2,)) if "weight_shape" in tensors else None
        if stored_shape is not None and stored_shape.values().tolist() != list(shape):
            raise stored_shape.error(f"says {stored_shape.values().tolist()}, but config.json makes it {list(shape)}")
        shapes = [(num_outputs, num_groups)] + ([(num_outputs,)] if num_groups == 1 else [])
        scale = tensors.take("weight_scale", FLOATS, *shapes)
        zeros = None
        if self.symmetric:
            _take_zeros(tensors, "weight_zero_point")
        else:
            zeros = tensors.take("weight_zero_point", INT32, (-(-num_outputs // per_word), num_groups))
        return GroupedIntegers(
            tensors.module,
            shape,
            self.bits,
            group_size,
            scale.dtype,
            codes=lambda first, last: word_codes(words.rows(first, last), self.bits)[:, :num_inputs],
            scales=lambda first, last: _checked(scale, first, last).reshape(last - first, num_groups),
            zeros=None if zeros is None else (lambda first, last: self._zeros(zeros, first, last)),
            packed=lambda first, last: words.rows(first, last).view(np.uint8),
        ).stored_matrix()

    def _zeros(self, words: StoredTensor, first: int, last: int) -> np.ndarray:
        per_word = 32 // self.bits
        begin = first // per_word
        by_group = word_codes(words.rows(begin, -(-last // per_word)).T, self.bits)  # [groups, outputs]
        return by_group.T[first - begin * per_word : last - begin * per_word]


def read_compressed_tensors(fields: Fields) -> Quantisation:
    """Read a config. Raises ModelError."""
    status = fields.text("quantization_status", "compressed")
    if status != "compressed":
        raise fields.error("quantization_status", f"{status!r} is not supported (compressed)")
    for name in ("sparsity_config", "transform_config"):
        section = fields.section(name)
        if section is not None and section.raw and section.get("format") != "dense":
            raise fields.error(name, "is not supported")
    ignored = patterns.exact_or_regex(fields, "ignore", patterns.entries(fields, "ignore"))
    groups = _groups(fields)

    def scheme_of(module: str) -> Scheme | None:
        if ignored(module):
            return None
        named = (scheme for targets, _, scheme in groups if targets(module))
        by_class = (scheme for _, any_linear, scheme in groups if any_linear)
        return next(named, None) or next(by_class, None)

    return Quantisation(
        label=f"compressed-tensors {fields.text('format', MIXED)}",
        source=fields.source,
        skip_field="ignore",
        scheme_of=scheme_of,
    )


def _groups(fields: Fields) -> list[tuple[Callable[[str], bool], bool, Scheme]]:
    """Return (matcher of target names, whether all linear modules are targets, scheme) per group."""
    default_format = fields.text("format", MIXED)
    if default_format not in (*FORMATS, MIXED):
        raise fields.error("format", f"{default_format!r} is not supported ({', '.join((*FORMATS, MIXED))})")
    section = fields.section("config_groups")
    if section is None or not section.raw or len(section.raw) > MAX_GROUPS:
        raise fields.error("config_groups", f"is not an object of 1 to {MAX_GROUPS} groups")
    groups = []
    for name in section.raw:
        group = section.section(name)
        if group is None:
            raise section.error(name, "is null")
        targets = patterns.entries(group, "targets")
        own_format = group.text("format", default_format)
        if own_format not in FORMATS:
            raise fields.error("format", f"{own_format!r} is not supported ({', '.join(FORMATS)})")
        matches = patterns.exact_or_regex(group, "targets", targets)
        groups.append((matches, "Linear" in targets, _scheme(group, own_format)))
    return groups


def _scheme(group: Fields, format: str) -> Scheme:
    weights, inputs = _arguments(group, "weights"), _arguments(group, "input_activations")
    if weights is None:
        raise group.error("weights", "missing")
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "are not supported")
    if weights.fields.get("actorder") not in (None, False, "weight", "static"):
        raise weights.fields.error("actorder", "is not supported (null, weight)")
    if format in FP4_FORMATS:
        return _fp4_scheme(weights, format)
    if format == PACKED:
        return _packed_scheme(group, weights, inputs)
    if weights.num_bits != 8 or not weights.symmetric:
        raise weights.fields.error("num_bits", f"{format} has 8 symmetric bits, not {weights.num_bits}")
    if weights.strategy == "block" and weights.kind == "float":
        if (block := weights.fields.get("block_structure")) not in BLOCK_STRUCTURES:
            raise weights.fields.error("block_structure", f"{block!r} is not supported ([{BLOCK}, {BLOCK}])"[:200])
        _check_inputs(inputs, weights.kind, ("group", "token", "tensor"))
        return Fp8BlockScheme()
    if weights.strategy not in ("tensor", "channel"):
        raise weights.fields.error("strategy", f"{weights.strategy!r} is not supported (tensor, channel, block)")
    _check_inputs(inputs, weights.kind, ("token", "tensor"))
    return (Fp8Scheme if weights.kind == "float" else Int8Scheme)(quantised_input=inputs is not None)


def _check_inputs(inputs: Arguments | None, kind: str, strategies: tuple[str, ...]) -> None:
    if inputs is None:
        return
    if (inputs.num_bits, inputs.kind) != (8, kind):
        raise inputs.fields.error("num_bits", f"{inputs.kind}{inputs.num_bits} is not supported ({kind}8)")
    if not inputs.symmetric:
        raise inputs.fields.error("symmetric", "false is not supported for input activations")
    if inputs.strategy not in strategies:
        raise inputs.fields.error("strategy", f"{inputs.strategy!r} is not supported ({', '.join(strategies)})")


def _packed_scheme(group: Fields, weights: Arguments, inputs: Arguments | None) -> PackedScheme:
    if inputs is not None:
        raise group.error("input_activations", f"are not supported with {PACKED} weights")
    if weights.kind != "int" or weights.num_bits not in (4, 8):
        raise weights.fields.error("num_bits", f"{weights.kind}{weights.num_bits} is not supported (int4, int8)")
    if weights.strategy not in ("group", "channel"):
        raise weights.fields.error("strategy", f"{weights.strategy!r} is not supported (group, channel)")
    if weights.strategy == "group" and weights.group_size <= 0:
        raise weights.fields.error("group_size", "missing")
    size = weights.group_size if weights.strategy == "group" else 0
    return PackedScheme(weights.num_bits, size, weights.symmetric)


def _fp4_scheme(weights: Arguments, format: str) -> Scheme:
    """Return the scheme without rounding inputs to 4 bits, which needs Blackwell and loses accuracy."""
    size = 16 if FP4_FORMATS[format] == "tensor_group" else 32
    if (weights.num_bits, weights.kind, weights.group_size) != (4, "float", size):
        raise weights.fields.error("group_size", f"{format} has 4-bit floats in groups of {size}")
    return Nvfp4Scheme() if size == 16 else Mxfp4Scheme()


def _arguments(group: Fields, name: str) -> Arguments | None:
    fields = group.section(name)
    if fields is None:
        return None
    kind = fields.text("type", "int")
    if kind not in ("int", "float"):
        raise fields.error("type", f"{kind!r} is not supported (int, float)")
    group_size = fields.integer("group_size", 0, low=-1, high=1 << 20)
    default = "group" if group_size > 0 else "channel" if group_size == -1 else "tensor"
    dynamic: Any = fields.get("dynamic")
    if dynamic not in (None, True, False, "local"):
        raise fields.error("dynamic", "is not true, false or local")
    return Arguments(
        num_bits=fields.integer("num_bits", 8, high=16),
        kind=kind,
        symmetric=fields.boolean("symmetric", True),
        strategy=fields.text("strategy", default),
        group_size=group_size,
        is_dynamic=bool(dynamic),
        fields=fields,
    )


def _checked(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
    values = tensor.rows(first, last)
    check_scales(tensor, values.astype(FLOAT32))
    return values


def _take_zeros(tensors: ModuleTensors, suffix: str) -> None:
    """Accept a symmetric scheme's zero points (in older files) if all are 0."""
    if suffix in tensors:
        tensor = tensors.take(suffix, INT8 + INT32 + INT64, tensors.shape(suffix) or ())
        if tensor.values().any():
            raise tensor.error("is not 0, but the config says symmetric")
