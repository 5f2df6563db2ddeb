"""Adapters of random values for the kernels' tests: mixed ranks, one that changes nothing, rows in random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.adapter_slots import adapter_rows
from model.ops.cpu.ops import NumpyOps
from model.ops.interface import AdapterMatrix, AdapterRows
from tests.support.kernel_checks import normal

RANKS = (8, 0, 3, 64)
PARTS = {"one": (512,), "two": (640, 1280), "three": (512, 640, 768)}


@dataclass(frozen=True)
class LoraCase:
    x: np.ndarray
    matrix: AdapterMatrix
    rows: AdapterRows
    out: np.ndarray


def lora_case(rng: np.random.Generator, dtype: str, parts: str, num_rows: int, num_inputs: int = 264) -> LoraCase:
    ends, max_rank = PARTS[parts], 64
    slots = rng.integers(-1, len(RANKS), num_rows).astype(np.int32)
    a = normal(rng, (len(RANKS), len(ends), max_rank, num_inputs), dtype, num_inputs**-0.5)
    b = normal(rng, (len(RANKS), ends[-1], max_rank), dtype)
    return LoraCase(
        normal(rng, (num_rows, num_inputs), dtype),
        AdapterMatrix(a, b, np.array(RANKS, np.int32), ends),
        adapter_rows(slots, NumpyOps()),
        normal(rng, (num_rows, ends[-1]), dtype),
    )
