"""The goldens of transformers on the GPU: the same paged steps as tests/unit/model/test_goldens.py."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Llama
from model.ops.backend import open_ops
from model.ops.interface import Ops
from tests.support.goldens import NAMES, Golden, relative_error

ERROR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["bfloat16", "float16", "float32"], scope="session")
def gpu(request: pytest.FixtureRequest) -> Ops:
    try:
        return open_ops("cuda", request.param, request.param)
    except ModelError as problem:
        pytest.skip(str(problem))


@pytest.fixture(params=NAMES, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden.load(request.param)


def has_experts(golden: Golden) -> bool:
    return ModelConfig.read(golden.folder).experts is not None


@pytest.fixture(scope="module")
def model(gpu: Ops, golden: Golden) -> Llama:
    if has_experts(golden) and gpu.dtype == np.float32:
        pytest.skip("float32 has no products of experts")
    with pytest.MonkeyPatch.context() as patched:  # users are refused until these pass
        patched.setattr("model.weights.loader.check_device", lambda config, ops: None)
        return golden.model(gpu)


def error_of(golden: Golden, logits: np.ndarray) -> float:
    """Return the error; with experts the rows' median: on the CPU too, bfloat16 sends one row in 50 to another
    expert."""
    if not has_experts(golden):
        return relative_error(logits, golden.logits)
    rows = zip(logits, golden.logits, strict=True)
    return float(np.median([relative_error(row, expected) for row, expected in rows]))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("lengths", [[104], [7, 33, 1, 16, 21, 26], [40, 1]], ids=["whole", "chunks", "tokens"])
def test_logits(golden: Golden, model: Llama, lengths: list[int], block_size: int):
    logits = golden.in_chunks(model, lengths, block_size)
    assert error_of(golden, logits) < ERROR[model.ops.dtype.name]
    assert np.mean(logits.argmax(axis=1) == golden.logits.argmax(axis=1)) > 0.9


def test_sequences_of_one_batch_do_not_touch(golden: Golden, model: Llama):
    for logits in golden.side_by_side(model, 16):
        assert error_of(golden, logits) < ERROR[model.ops.dtype.name]
