"""all_finite looks at bits: every NaN, both infinities, and no number."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import DTYPES
from model.dtypes import NUMPY_DTYPES, all_finite


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
