"""bitsandbytes nf4: 4-bit indices into a table, with block scales; dequantised while read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.config_fields import Fields
from model.json_files import parse_json_object
from model.weights.formats import patterns
from model.weights.formats.quantisation import Quantisation
from model.weights.formats.stored_matrix import (
    FLOAT32,
    UINT8,
    ModuleTensors,
    StoredMatrix,
    check_scales,
    dense_matrix,
)
from model.weights.safetensors_file import StoredTensor

STATE = "weight.quant_state.bitsandbytes__nf4"
MAX_STATE_BYTES = 1 << 16
F32 = (FLOAT32,)


@dataclass(frozen=True)
class Nf4Scheme:
    """Matrix flattened by rows, even elements in a byte's high half; scales may themselves be 8-bit codes."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        size = shape[0] * shape[1]
        data = tensors.take("weight", UINT8, (size // 2, 1), (1, size // 2))
        state = _state(tensors, shape)
        block = state.integer("blocksize", high=1 << 16)
        if block % 2 or size % block:
            raise state.error("blocksize", f"{block} does not divide the matrix {list(shape)}")
        table = _finite(tensors.take("weight.quant_map", F32, (16,)))
        scales = _scales(tensors, size // block, state)

        def convert(first: int, last: int) -> np.ndarray:
            begin, end = first * shape[1], last * shape[1]
            start = begin - begin % 2
            packed = np.empty(-(-end // 2) - start // 2, np.uint8)
            data.read_into(start // 2, packed)
            values = np.empty(2 * len(packed), FLOAT32)
            values[0::2], values[1::2] = table[packed >> 4], table[packed & 15]
            values = values[begin - start : end - start]
            values *= scales[np.arange(begin, end) // block]
            return values.reshape(last - first, shape[1])

        return dense_matrix(tensors.module, shape, convert)


def read_bitsandbytes(fields: Fields) -> Quantisation:
    """Read `quant_method: "bitsandbytes"`. Raises ModelError."""
    if not fields.boolean("load_in_4bit", False):
        raise fields.error("load_in_4bit", "8-bit weights are not supported (true)")
    if (kind := fields.text("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise fields.error("bnb_4bit_quant_type", f"{kind!r} is not supported (nf4)")
    if (storage := fields.text("bnb_4bit_quant_storage", "uint8")) != "uint8":
        raise fields.error("bnb_4bit_quant_storage", f"{storage!r} is not supported (uint8)")
    is_skipped = patterns.name_parts(patterns.entries(fields, "llm_int8_skip_modules"))
    return Quantisation(
        label="bitsandbytes nf4",
        source=fields.source,
        skip_field="llm_int8_skip_modules",
        scheme_of=lambda module: None if is_skipped(module) else Nf4Scheme(),
        may_be_dense=lambda module: module == "lm_head",
    )


def _state(tensors: ModuleTensors, shape: tuple[int, int]) -> Fields:
    stored_shape = tensors.shape(STATE) or ()
    if len(stored_shape) != 1 or stored_shape[0] > MAX_STATE_BYTES:
        stored_shape = (0,)
    tensor = tensors.take(STATE, UINT8, stored_shape)
    where = f"{tensor.file}: tensor {tensor.name!r}"
    state = Fields(parse_json_object(tensor.values().tobytes(), where), where)
    if state.get("shape") != list(shape):
        raise state.error("shape", f"is {str(state.get('shape'))[:60]}, but config.json makes it {list(shape)}")
    return state


def _scales(tensors: ModuleTensors, num_blocks: int, state: Fields) -> np.ndarray:
    """Return float32[num_blocks]."""
    if "weight.nested_absmax" not in tensors:
        tensor = tensors.take("weight.absmax", F32, (num_blocks,))
        values = tensor.values()
    else:
        tensor = tensors.take("weight.absmax", UINT8, (num_blocks,))
        nested_block = state.integer("nested_blocksize", high=1 << 16)
        offset = np.float32(state.number("nested_offset", low=-1e6, high=1e6))
        table = _finite(tensors.take("weight.nested_quant_map", F32, (256,)))
        outer = _finite(tensors.take("weight.nested_absmax", F32, (-(-num_blocks // nested_block),)))
        values = table[tensor.values()] * outer[np.arange(num_blocks) // nested_block] + offset
    check_scales(tensor, values, zero_allowed=True)
    return values


def _finite(tensor: StoredTensor) -> np.ndarray:
    values = tensor.values()
    if not np.isfinite(values).all():
        raise tensor.error("holds NaN or infinity")
    return values
