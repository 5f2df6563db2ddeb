"""Goldens of transformers on a group of GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from model.errors import ModelError
from tests.support.goldens import NAMES, Golden, relative_error

ERROR = {"float32": 1e-4, "bfloat16": 2e-2}

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float32") for name in NAMES] + [(name, "bfloat16") for name in NAMES[::5]]
)
def test_logits(open_group, name: str, dtype: str):
    golden, ops = Golden.load(name), open_group(dtype)
    try:
        model = golden.model(ops)
    except ModelError as refusal:
        pytest.skip(str(refusal))
    for lengths in ([104], [7, 33, 1, 16, 21, 26]):
        logits = golden.in_chunks(model, lengths, 16)
        assert relative_error(logits, golden.logits) < ERROR[dtype]
        assert np.mean(logits.argmax(axis=1) == golden.logits.argmax(axis=1)) > 0.9
