"""8-bit weights for tests, and their values in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.ops.fp8 import E4M3
from model.ops.weight import Weight, WeightFormat
from tests.support.kernel_checks import NUM_DRAWN, repeated

KINDS = (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8)
BLOCK = 128


def random_w8(rng: np.random.Generator, n: int, k: int, kind: WeightFormat) -> Weight:
    """Return a weight whose products with rows of ones' size are near one; its scales differ by a factor of ten."""
    if kind is WeightFormat.INT8:
        data, size = rng.integers(-128, 128, (n, k), np.int8), 74.0
    else:
        data, size = (100 * rng.standard_normal((n, k), np.float32)).clip(-448, 448).astype(E4M3).view(np.uint8), 97.0
    shape = (-(-n // BLOCK), -(-k // BLOCK)) if kind is WeightFormat.FP8_BLOCK else (n,)
    sizes = np.exp(0.7 * rng.standard_normal(shape, np.float32)) / (size * k**0.5)
    return Weight(data, kind, sizes.astype(np.float32))


def repeated_w8(rng: np.random.Generator, n: int, k: int, kind: WeightFormat) -> Weight:
    """Return `random_w8`, NUM_DRAWN rows repeated, for a timing."""
    part = random_w8(rng, min(n, NUM_DRAWN), k, kind)
    num_scales = -(-n // BLOCK) if kind is WeightFormat.FP8_BLOCK else n
    return Weight(repeated(part.data, n, k), kind, repeated(part.scale, num_scales, *part.scale.shape[1:]))


def upload_w8(ops, weight: Weight) -> Weight:
    return ops.prepare_weight(replace(weight, data=ops.upload(weight.data), scale=ops.upload(weight.scale)))


def w8_in_float64(weight: Weight) -> np.ndarray:
    """[N, K] by plain indexing, not as the reference computes it."""
    n, k = weight.shape
    codes = weight.data if weight.format is WeightFormat.INT8 else weight.data.view(E4M3).astype(np.float32)
    row, column = np.arange(n)[:, None], np.arange(k)[None]
    in_blocks = weight.format is WeightFormat.FP8_BLOCK
    scale = weight.scale[row // BLOCK, column // BLOCK] if in_blocks else weight.scale[:, None]
    return codes.astype(np.float64) * scale
