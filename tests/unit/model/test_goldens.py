"""Every family against transformers, through the paged cache: in one chunk, in chunks, token by token, side by side."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.rope_config import COMMON_KINDS
from tests.support.goldens import FOLDER, IN_OTHERS, NAMES, Golden, relative_error
from tests.support.paged import PagedSequences

FLOAT32_ERROR = 1e-4
HALF_ERROR = 2e-2
WHOLE, CHUNKS, TOKENS = [104], [7, 33, 1, 16, 21, 26], [1]


@pytest.fixture(params=NAMES, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden.load(request.param)


@pytest.fixture(scope="module")
def model(golden: Golden) -> Llama:
    return golden.model(NumpyOps())


def test_every_family_and_rope_has_a_golden():
    kinds = {rope.kind for name in NAMES for rope in ModelConfig.read(FOLDER / name).ropes}
    assert kinds == {*COMMON_KINDS, "longrope", "none"}


STEPS = [(WHOLE, 16), (CHUNKS, 8), (CHUNKS, 32), (TOKENS, 8), (TOKENS, 32)]
IN_ALL_STEPS = ("llama", "mistral_window", "qwen2", "qwen3_bf16")
"""Goldens of every head size, window and rope; the others differ in what each token goes through."""


@pytest.mark.parametrize(
    ("golden", "lengths", "block_size"),
    [
        (name, *steps)
        for name in NAMES
        for steps in STEPS[: 5 if name.startswith(IN_ALL_STEPS) else 1 if name.startswith(IN_OTHERS) else 2]
    ],
    indirect=["golden"],
)
def test_logits(golden: Golden, model: Llama, lengths: list[int], block_size: int):
    assert relative_error(golden.in_chunks(model, lengths, block_size), golden.logits) < FLOAT32_ERROR


def test_greedy_continuation(golden: Golden, model: Llama):
    assert golden.greedy(model, 16) == golden.token_ids[golden.num_prompt :].tolist()


def test_sequences_of_one_batch_do_not_touch(golden: Golden, model: Llama):
    for logits in golden.side_by_side(model, 16):
        assert relative_error(logits, golden.logits) < FLOAT32_ERROR


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(golden: Golden, dtype: str):
    logits = golden.in_chunks(golden.model(NumpyOps(NUMPY_DTYPES[dtype])), [golden.num_prompt, 32], 16)
    rows = slice(None)
    if golden.model(NumpyOps()).config.experts is not None:  # rounding makes a few tokens choose another expert
        rows = np.argsort(np.linalg.norm(logits - golden.logits, axis=1))[: -len(logits) // 20]
    assert relative_error(logits[rows], golden.logits[rows]) < HALF_ERROR
    assert np.mean(logits.argmax(axis=1) == golden.logits.argmax(axis=1)) > 0.9


def test_the_last_token_s_embedding():
    golden = Golden.load("qwen3_embedding_base_bf16")
    model = golden.model(NumpyOps())
    hidden = PagedSequences(model, 1, len(golden.token_ids), 16).hidden(golden.token_ids)[-1]
    with np.load(golden.folder / "golden.npz") as arrays:
        expected = arrays["embedding"]
    assert relative_error(hidden / np.linalg.norm(hidden), expected) < FLOAT32_ERROR
