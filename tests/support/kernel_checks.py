"""Compare a kernel with its NumPy reference, and time it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import ml_dtypes
import numpy as np

DTYPES = ("float32", "float16", "bfloat16")
NUMPY_DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES}
TOLERANCES = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""Norm of the difference over the norm of the expected array."""

NUM_DRAWN = 256
"""Rows of a large matrix that are drawn for a timing, and repeated."""


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(NUMPY_DTYPES[dtype])


def repeated(part: np.ndarray, *shape: int) -> np.ndarray:
    """Repeat `part` to an array of `shape`, for a timing: drawing gigabytes takes seconds."""
    return np.resize(part, shape)


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Compare by norm in float64; NaN and infinity never pass."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    got, wanted = actual.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} of {got.size} elements are not finite"
    error = np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30)
    assert error <= TOLERANCES[dtype], f"relative error {error:.2e}"


def seconds_of(ops, launches: list[Callable[[], object]], rounds: int = 15) -> float:
    """Return the median device time of a launch over warm rounds through `launches`, one per set of inputs."""
    ops.is_poisoning = False
    try:
        _round(ops, launches)
        times = []
        for _ in range(rounds):
            begin = ops.record_event()
            _round(ops, launches)
            times.append(ops.elapsed_s(begin, ops.record_event()) / len(launches))
    finally:
        ops.is_poisoning = True
    return median(times)


def _round(ops, launches: list[Callable[[], object]]) -> None:
    for launch in launches:
        with ops.scratch():
            launch()


def report_bandwidth(what: str, num_bytes: int, seconds: float) -> None:
    print(f"\n{what}: {num_bytes / seconds / 1e9:.0f} GB/s ({seconds * 1e6:.1f} us)")


def report_flops(what: str, num_flops: int, seconds: float) -> None:
    print(f"\n{what}: {num_flops / seconds / 1e12:.1f} TFLOP/s ({seconds * 1e6:.1f} us)")
