"""Quantised formats divided among GPUs: the reference's logits of the same rounded weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from tests.support.doubled_mlp import double_mlp
from tests.support.fp8_models import fp8_model, logits_of
from tests.support.goldens import relative_error
from tests.support.kernel_checks import NUMPY_DTYPES
from tests.unit.model.weights.test_sharding import FORMATS, GROUPED

pytestmark = pytest.mark.gpu
MAX_LEN = 64
ERROR = 12e-2
"""Each rank rounds its own inputs of o and down; on the CPU two ranks differ from one by 8e-2."""


@pytest.mark.parametrize("name", ["llama3_gqa_bf16", "qwen2_bf16"])
def test_weights_rounded_to_fp8(open_group, name):
    ops = open_group("bfloat16")
    assert relative_error(logits_of(fp8_model(ops, name)), logits_of(fp8_model(NumpyOps(ops.dtype), name))) < ERROR


@pytest.mark.parametrize("folder", sorted(FORMATS.iterdir()), ids=lambda folder: folder.name)
def test_every_format(open_group, tmp_path: Path, folder: Path):
    """Groups of 4 bits divide where the MLP is twice as wide."""
    if folder.name in GROUPED:
        folder = double_mlp(folder, tmp_path / "model", mixes_groups=False)
    logits = []
    for ops in (open_group("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])):
        try:
            model = load_model(folder, ModelConfig.read(folder), ops, MAX_LEN)
        except ModelError as refusal:
            pytest.skip(str(refusal))
        logits.append(logits_of(model))
    errors = [relative_error(row, wanted) for row, wanted in zip(*logits, strict=True)]
    assert np.median(errors) < ERROR
