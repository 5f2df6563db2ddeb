"""Weight matrices and their formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

Array = Any
"""A NumPy or CuPy array."""


class WeightFormat(StrEnum):
    DENSE = "dense"  # data [N, K] in the activations' dtype; no scale
    FP8 = "fp8"  # data uint8[N, K], bits of e4m3; scale float32[N]
    FP8_BLOCK = "fp8-block"  # data as FP8; scale float32[ceil(N / 128), ceil(K / 128)] of blocks
    INT8 = "int8"  # data int8[N, K]; scale float32[N]
    INT4 = "int4"  # data uint8[N, K / 2]: element k is the low (even k) or high half of byte k // 2;
    # scale 16-bit float[N, K / G], zero_point uint8[N, K / G] or None (8): (data - zero_point) * scale
    INT4_TILED = "int4-tiled"  # INT4 as in cuda/common/int4.cuh: data uint8[K / 128, N / 16, 1024], scale and
    # zero_point [K / G, N / 16, 16]; made by `Ops.prepare_weight` only


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K], stored [out, in], or one per expert, with E as the first dimension of every array."""

    data: Array
    format: WeightFormat = WeightFormat.DENSE
    scale: Array | None = None
    zero_point: Array | None = None
    group_size: int = 0  # G: inputs that share a scale
    quantised_input: bool = False  # FP8, INT8: round rows of x to this format
    input_order: Array | None = None  # int32[K]: column k multiplies x[:, input_order[k]] (GPTQ's desc_act), among
    # the inputs of all ranks if the matrix is divided by columns; None: k

    @classmethod
    def fp8(cls, data: Array, scale: Array) -> Weight:
        """Return an FP8 matrix with e4m3 inputs."""
        return cls(data, WeightFormat.FP8, scale, quantised_input=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), per expert."""
        if self.format is WeightFormat.INT4_TILED:
            return self.data.shape[-2] * 16, self.data.shape[-3] * 128
        num_outputs, width = self.data.shape[-2:]
        return num_outputs, width * 2 if self.format is WeightFormat.INT4 else width

    @property
    def nbytes(self) -> int:
        arrays = (self.data, self.scale, self.zero_point, self.input_order)
        return sum(array.nbytes for array in arrays if array is not None)

    def expert(self, index: int) -> Weight:
        """Return one expert's matrix [N, K]."""

        def part(array: Array | None) -> Array | None:
            return None if array is None else array[index]

        return replace(
            self,
            data=self.data[index],
            scale=part(self.scale),
            zero_point=part(self.zero_point),
            input_order=part(self.input_order),
        )


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one layer of experts."""

    router: Weight  # [E, H], never quantised
    gate_up: Weight  # [E, 2 I, H]
    down: Weight  # [E, H, I]
