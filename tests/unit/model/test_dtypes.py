"""all_finite looks at bits: every NaN, both infinities, and no number."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import DTYPES
from model.dtypes import NUMPY_DTYPES, all_finite, narrow, widen


def test_configs_name_the_types_that_arrays_have():
    assert list(NUMPY_DTYPES) == [*DTYPES]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_pattern(name: str):
    values = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[name])
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(values)
    assert all_finite(values[finite])
    assert not any(all_finite(values[i : i + 1]) for i in np.flatnonzero(~finite))


def test_float32_at_its_edges_and_beyond_one_piece():
    values = np.full((3, 50_000), np.finfo(np.float32).max, np.float32)
    assert all_finite(values)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        values[2, 49_999] = bad
        assert not all_finite(values)
    assert all_finite(np.empty((0, 4), np.float32))


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_widening_and_narrowing_are_the_types_own_casts(name: str):
    dtype, rng = NUMPY_DTYPES[name], np.random.default_rng(0)
    bits = rng.integers(0, 0x7F800000, 20_000, np.uint32) | rng.integers(0, 2, 20_000).astype(np.uint32) << 31
    wide = np.append(bits.view(np.float32), np.float32([0, -0.0, 3.4028235e38, 1 + 2**-8, 1 + 3 * 2**-8]))
    with np.errstate(over="ignore"):
        expected = wide.astype(dtype)
        out = np.empty(wide.shape, dtype)
        narrow(wide, out, np.empty_like(wide))
    assert out.tobytes() == expected.tobytes()
    widen(expected, wide)
    assert wide.tobytes() == expected.astype(np.float32).tobytes()
