"""NVFP4 and MXFP4: e2m1 values, two per byte, with block scales; dequantised while read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.weights.formats.integers import unpack_nibbles
from model.weights.formats.stored_matrix import (
    E8M0,
    FLOAT32,
    FP8,
    UINT8,
    ModuleTensors,
    StoredMatrix,
    check_scales,
    dense_matrix,
)
from model.weights.safetensors_file import StoredTensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], FLOAT32)


@dataclass(frozen=True)
class Nvfp4Scheme:
    """Blocks of 16 inputs with e4m3 scales, and a matrix scale: a multiplier or a divisor."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        for name in ("input_global_scale", "input_scale"):
            if name in tensors:
                tensors.take_scalar(name)
        if "weight_scale_2" in tensors:  # ModelOpt: a multiplier
            data_name, factor = "weight", tensors.take_scalar("weight_scale_2")
        else:  # compressed-tensors: a divisor
            data_name, factor = "weight_packed", np.float32(1) / tensors.take_scalar("weight_global_scale")
        return _read_blocks(tensors, shape, data_name, 16, FP8, factor)


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Blocks of 32 inputs with power-of-two scales."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
        return _read_blocks(tensors, shape, "weight_packed", 32, UINT8 + E8M0, np.float32(1))


def _read_blocks(
    tensors: ModuleTensors,
    shape: tuple[int, int],
    data_name: str,
    block: int,
    scale_dtypes: tuple[np.dtype, ...],
    factor: np.float32,
) -> StoredMatrix:
    num_outputs, num_inputs = shape
    data = tensors.take(data_name, UINT8, (num_outputs, num_inputs // 2))
    if num_inputs % block:
        raise data.error(f"{num_inputs} inputs are no multiple of the {block} of a block")
    scale = tensors.take("weight_scale", scale_dtypes, (num_outputs, num_inputs // block))

    def convert(first: int, last: int) -> np.ndarray:
        values = np.take(E2M1, unpack_nibbles(data.rows(first, last))).reshape(last - first, -1, block)
        scales = _block_scales(scale, first, last) * factor
        values *= scales[:, :, None]
        return values.reshape(last - first, num_inputs)

    return dense_matrix(tensors.module, shape, convert)


def _block_scales(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
    stored = tensor.rows(first, last)
    values = stored.view(E8M0[0]).astype(FLOAT32) if tensor.dtype in UINT8 else stored.astype(FLOAT32)
    check_scales(tensor, values, zero_allowed=True)
    return values
