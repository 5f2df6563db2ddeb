"""The checked-in tiny models with transformers' results (see make_goldens.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.families.llama import Llama
from model.ops.interface import Ops
from model.weights.loader import load_model
from tests.support.paged import PagedSequences

FOLDER = Path(__file__).parents[1] / "unit" / "model" / "goldens"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
IN_OTHERS = ("cwm", "granite4", "helium", "internlm3", "iquestcoder", "mellum", "olmoe")
"""Begin of goldens whose differences from Llama are in others too; tests of formats and ranks leave them out."""


@dataclass(frozen=True)
class Golden:
    """token_ids int32[T]: prompt and greedy continuation; logits float32[T, V] of all of them."""

    folder: Path
    token_ids: np.ndarray
    logits: np.ndarray
    num_prompt: int

    @staticmethod
    def load(name: str) -> Golden:
        with np.load(FOLDER / name / "golden.npz") as arrays:
            return Golden(FOLDER / name, arrays["token_ids"], arrays["logits"], int(arrays["num_prompt"]))

    def model(self, ops: Ops) -> Llama:
        return load_model(self.folder, ModelConfig.read(self.folder), ops, len(self.token_ids))

    def in_chunks(self, model: Llama, lengths: list[int], block_size: int) -> np.ndarray:
        """Return float32[T, V] of all tokens, computed in steps of these lengths, the last one repeated."""
        pages = PagedSequences(model, 1, len(self.token_ids), block_size)
        rows, start = [], 0
        while start < len(self.token_ids):
            length = lengths[min(len(rows), len(lengths) - 1)]
            rows += pages.forward([(0, self.token_ids[start : start + length])])
            start += length
        return np.concatenate(rows)

    def greedy(self, model: Llama, block_size: int) -> list[int]:
        """Compute the prompt in one chunk; return the greedy continuation."""
        pages = PagedSequences(model, 1, len(self.token_ids), block_size)
        logits = pages.forward([(0, self.token_ids[: self.num_prompt])])[0]
        generated = [int(np.argmax(logits[-1]))]
        while self.num_prompt + len(generated) < len(self.token_ids):
            logits = pages.forward([(0, np.array(generated[-1:]))])[0]
            generated.append(int(np.argmax(logits[-1])))
        return generated

    def side_by_side(self, model: Llama, block_size: int) -> list[np.ndarray]:
        """Compute three sequences of the same tokens in one batch, mixing chunks and single tokens."""
        pages, paces = PagedSequences(model, 3, len(self.token_ids), block_size), (1, 5, 19)
        rows: list[list[np.ndarray]] = [[], [], []]
        while pages.num_computed != [len(self.token_ids)] * 3:
            starts = list(pages.num_computed)
            running = [s for s in range(3) if starts[s] < len(self.token_ids)]
            chunks = [(s, self.token_ids[starts[s] : starts[s] + paces[s]]) for s in running]
            for s, logits in zip(running, pages.forward(chunks), strict=True):
                rows[s].append(logits)
        return [np.concatenate(pieces) for pieces in rows]


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference over that of `expected`; NaN for a NaN, which passes no comparison."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
