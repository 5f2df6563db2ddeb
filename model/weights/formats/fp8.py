"""FP8: e4m3 weights with one scale per matrix, row or 128 x 128 block."""

from __future__ import annotations

from dataclasses import dataclass

from model.config_fields import Fields
from model.ops.weight import WeightFormat
from model.weights.formats import patterns
from model.weights.formats.quantisation import Quantisation
from model.weights.formats.stored_matrix import (
    BLOCK,
    E8M0,
    FLOAT32,
    FLOATS,
    FP8,
    SCALAR_SHAPES,
    ConvertedRows,
    CopiedRows,
    ModuleTensors,
    Scheme,
    StoredMatrix,
    WeightForm,
    constant_scale,
    read_scales,
    row_scales,
)

SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""Both are multipliers, despite the second name."""

INPUT_SCALE_NAMES = ("input_scale", "activation_scale", "act_scale")


@dataclass(frozen=True)
class Fp8Scheme:
    """One scale per matrix or row. Static input scales are unused: each row of x gets its own."""

    quantised_input: bool

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        weight = tensors.take("weight", FP8, shape)
        for name in INPUT_SCALE_NAMES:
            if name in tensors:
                tensors.take_scalar(name)
        name = _scale_name(tensors)
        if tensors.shape(name) in SCALAR_SHAPES:
            scale = constant_scale(tensors.take_scalar(name))
        else:
            scale = row_scales(tensors.take(name, FLOATS, (shape[0],), (shape[0], 1)))
        form = WeightForm(WeightFormat.FP8, scale_dtype=FLOAT32, quantised_input=self.quantised_input)
        return StoredMatrix(tensors.module, shape, form, {"data": CopiedRows(weight), "scale": scale}, e4m3=weight)


@dataclass(frozen=True)
class Fp8BlockScheme:
    """One scale per 128 x 128 block. The input is not rounded: no reference here has scales per 128 inputs."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        weight = tensors.take("weight", FP8, shape)
        blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        scale = tensors.take(_scale_name(tensors), FLOATS + E8M0, blocks)
        rows = ConvertedRows(blocks[1], lambda first, last: read_scales(scale, first, last))
        form = WeightForm(WeightFormat.FP8_BLOCK, scale_dtype=FLOAT32)
        return StoredMatrix(tensors.module, shape, form, {"data": CopiedRows(weight), "scale": rows}, e4m3=weight)


def read_fp8(fields: Fields) -> Quantisation:
    """Read `quant_method: "fp8"` of DeepSeek, Qwen and AutoFP8. Raises ModelError."""
    if (fmt := fields.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", f"{fmt!r} is not supported (e4m3)")
    activations = fields.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise fields.error("activation_scheme", f"{activations!r} is not supported (dynamic, static)")
    block = fields.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise fields.error("weight_block_size", f"{block!r} is not supported (null, [{BLOCK}, {BLOCK}])"[:200])
    scheme: Scheme = Fp8Scheme(quantised_input=True) if block is None else Fp8BlockScheme()
    names = patterns.entries(fields, "modules_to_not_convert") + patterns.entries(fields, "ignored_layers")
    is_skipped = patterns.name_parts(names)
    return Quantisation(
        label="fp8 per tensor" if block is None else f"fp8 in blocks of {BLOCK} x {BLOCK}",
        source=fields.source,
        skip_field="modules_to_not_convert",
        scheme_of=lambda module: None if is_skipped(module) else scheme,
        may_be_dense=lambda module: module == "lm_head",
    )


def _scale_name(tensors: ModuleTensors) -> str:
    return next((name for name in SCALE_NAMES if name in tensors), SCALE_NAMES[0])
