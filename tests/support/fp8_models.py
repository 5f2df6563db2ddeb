"""Models whose matrices are rounded to e4m3 during loading."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.families.llama import Llama
from model.ops.interface import Ops
from model.weights.loader import load_model
from tests.support.goldens import FOLDER
from tests.support.paged import PagedSequences

NAME, MAX_LEN = "llama3_gqa_bf16", 64


def fp8_model(ops: Ops, name: str = NAME) -> Llama:
    folder = FOLDER / name
    return load_model(folder, ModelConfig.read(folder), ops, MAX_LEN, quantization="fp8")


def logits_of(model: Llama, lengths: tuple[int, ...] = (20, 1, 1)) -> np.ndarray:
    """Return the logits of two sequences, computed in steps of these lengths."""
    token_ids = np.random.default_rng(5).integers(0, model.config.vocab_size, (2, sum(lengths)))
    pages, start, rows = PagedSequences(model, 2, MAX_LEN, 16), 0, []
    for length in lengths:
        rows += pages.forward([(s, token_ids[s, start : start + length]) for s in range(2)])
        start += length
    return np.concatenate(rows)
