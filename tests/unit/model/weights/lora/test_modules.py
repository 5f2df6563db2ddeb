"""Planned modules, read to places of a memory."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.weights.lora.modules import PlannedModule, PlannedTensor, read_modules
from model.weights.safetensors_file import read_safetensors
from tests.support.safetensors_bytes import save

BFLOAT16 = NUMPY_DTYPES["bfloat16"]
A, B = np.arange(24, dtype=np.float32).reshape(2, 12), np.arange(16, dtype=np.float32).reshape(8, 2)
SWAPPED = np.array([4, 5, 6, 7, 0, 1, 2, 3])


def planned(folder, a=A, b=B, **changes):
    """Save A and B; return the file and the module, B at byte 0 of the memory and A at 128."""
    path = folder / "adapter.safetensors"
    save(path, {"a": a, "b": b})
    stored = read_safetensors(path)
    tensors = [
        PlannedTensor(tensor.name, tensor.dtype, tensor.shape, tensor.offset, begin)
        for tensor, begin in ((stored["a"], 128), (stored["b"], 0))
    ]
    return stored["a"].file, PlannedModule("q_proj", 2, 0.5, *tensors, None)._replace(**changes)


def read(folder, dtype=BFLOAT16, **how):
    """Return A, B and the digest."""
    file, module = planned(folder, **how)
    memory = np.zeros(256, np.uint8)
    (digest,) = read_modules(file, [pickle.loads(pickle.dumps(module))], memory, dtype)
    return *module.part(memory, dtype), digest


@pytest.mark.parametrize("stored", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_b_is_scaled_and_its_rows_are_ordered(tmp_path, stored):
    a, b, _ = read(tmp_path, a=A.astype(stored), b=B.astype(stored), row_order=SWAPPED)
    np.testing.assert_array_equal(a, A.astype(BFLOAT16))
    np.testing.assert_array_equal(b, (B[SWAPPED] / 2).astype(BFLOAT16))


def test_the_digest_is_of_the_stored_values_and_what_they_are_multiplied_by(tmp_path):
    *_, first = read(tmp_path)
    assert read(tmp_path, dtype=np.dtype(np.float16))[2] == first
    others = ({"name": "k_proj"}, {"rank": 1}, {"scale": 0.25}, {"a": A + 1}, {"b": B + 1})
    assert len({first, *(read(tmp_path, **change)[2] for change in others)}) == 6


def test_an_infinity_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"adapter.safetensors: tensor 'b': NaN or infinity in float16"):
        read(tmp_path, b=B * 1e4, dtype=np.dtype(np.float16))
