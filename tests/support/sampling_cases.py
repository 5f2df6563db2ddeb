"""Random parameters of `Ops.sample`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from model.ops.interface import Array, Bias, Penalties, SamplingArrays, TokenMask


def random_bias(rng: np.random.Generator, rows: int, vocab: int) -> Bias:
    """Return biases: some rows have none; ids outside the vocabulary, forbidden tokens, tokens twice in a row."""
    ids = [rng.permutation(vocab)[: rng.integers(0, 9)] for _ in range(rows)]
    ids = [np.concatenate([row, row[:1], [-1, vocab, 2**31 - 1]]) if len(row) else row for row in ids]
    count = sum(map(len, ids))
    values = rng.uniform(-20, 20, count).astype(np.float32)
    values[rng.random(count) < 0.2] = -np.inf
    return Bias(_indptr(ids), np.concatenate(ids).astype(np.int32), values)


def random_penalties(rng: np.random.Generator, rows: int, vocab: int) -> Penalties:
    """Return penalties: some rows have seen no token; ids outside the vocabulary; prompt-only tokens."""
    ids = [rng.permutation(vocab)[: rng.integers(0, 2000) * (row % 3 > 0)] for row in range(rows)]
    ids = [np.concatenate([row, [-1, vocab]]) for row in ids]
    count = sum(map(len, ids))
    return Penalties(
        repetition=rng.uniform(0.5, 2, rows).astype(np.float32),
        presence=rng.uniform(-2, 2, rows).astype(np.float32),
        frequency=rng.uniform(-2, 2, rows).astype(np.float32),
        indptr=_indptr(ids),
        token_ids=np.concatenate(ids).astype(np.int32),
        output_counts=(rng.integers(0, 30, count) * rng.integers(0, 2, count)).astype(np.int32),
    )


def random_mask(rng: np.random.Generator, rows: int, vocab: int) -> TokenMask:
    """Return a mask: none for every third row, one row with a single token, the last words cut off."""
    num_words = max(1, -(-vocab // 32) - 1)
    words = rng.integers(0, 2**32, (rows, num_words), np.uint32, endpoint=False)
    words[0] = 0
    words[0, rng.integers(num_words)] = 1
    mask_rows = rng.permutation(rows).astype(np.int32)
    mask_rows[2::3] = rng.choice([-1, rows, 2**31 - 1], len(mask_rows[2::3]))
    mask_rows[0] = 0
    return TokenMask(mask_rows, words)


def random_options(rng: np.random.Generator, rows: int, vocab: int, **fixed) -> SamplingArrays:
    """Return parameters of greedy, plain and filtered rows; `fixed` replaces columns or other fields."""

    def one_of(values, dtype):
        return rng.choice(np.array(values, dtype), rows)

    options = {
        "temperature": one_of([0, 0.05, 0.3, 0.7, 1, 1, 1.5, 4], np.float32),
        "top_k": one_of([1, 2, 5, 50, 1000, vocab, vocab, 2**31 - 1], np.int32),
        "top_p": one_of([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1, 1], np.float32),
        "min_p": one_of([0, 0, 0, 0.01, 0.1, 0.5, 1], np.float32),
        "seed": rng.integers(0, 2**64, rows, np.uint64, endpoint=False),
        "position": rng.integers(0, 2**32, rows, np.uint32, endpoint=False),
        "branch": rng.integers(0, 2**32, rows, np.uint32, endpoint=False),
        "penalties": None,
        "bias": None,
        "num_logprobs": 0,
        "with_logprobs": False,
    }
    return SamplingArrays(**{**options, **fixed})


def uploaded(options: SamplingArrays, upload: Callable[[np.ndarray], Array]) -> SamplingArrays:
    """Return the parameters with every array uploaded."""
    return SamplingArrays(**{key: _uploaded(each, upload) for key, each in vars(options).items()})


def _uploaded(value, upload):
    if isinstance(value, np.ndarray):
        return upload(value)
    if isinstance(value, Bias | Penalties | TokenMask):
        return type(value)(**{key: upload(each) for key, each in vars(value).items()})
    return value


def _indptr(ragged: list[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, ragged)]).astype(np.int32)
