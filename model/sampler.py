"""From what requests ask of sampling to the arrays that `Ops.sample` takes: one row a sequence that gets a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.ops.interface import Array, Bias, Penalties, SamplingArrays
from model.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One sequence about to get its next token, which will stand at position len(token_ids)."""

    sampling: SamplingParams
    token_ids: Sequence[int]  # prompt and output so far
    num_prompt_tokens: int
    branch: int


def sampling_arrays(
    rows: Sequence[SampledRow],
    vocab_size: int,
    eos_token_ids: frozenset[int],
    upload: Callable[[np.ndarray], Array],
) -> SamplingArrays:
    """Arrays for R = len(rows) rows, sent by `upload` to where the logits are."""
    wishes = [row.sampling for row in rows]

    def column(values, dtype) -> Array:
        return upload(np.fromiter(values, dtype, len(rows)))

    alternatives = [wish.logprobs for wish in wishes if wish.logprobs is not None]
    return SamplingArrays(
        temperature=column((wish.temperature for wish in wishes), np.float32),
        top_k=column((vocab_size if wish.top_k is None else min(wish.top_k, vocab_size) for wish in wishes), np.int32),
        top_p=column((wish.top_p for wish in wishes), np.float32),
        min_p=column((wish.min_p for wish in wishes), np.float32),
        seed=column((wish.seed for wish in wishes), np.uint64),
        position=column((len(row.token_ids) for row in rows), np.uint32),
        branch=column((row.branch for row in rows), np.uint32),
        penalties=_penalties(rows, column, upload),
        bias=_bias(rows, eos_token_ids, upload),
        num_logprobs=max(alternatives, default=0),
        with_logprobs=bool(alternatives),
    )


def _penalties(rows: Sequence[SampledRow], column, upload) -> Penalties | None:
    if not any(row.sampling.has_penalties for row in rows):
        return None
    seen = [_seen_tokens(row) if row.sampling.has_penalties else {} for row in rows]
    return Penalties(
        repetition=column((row.sampling.repetition_penalty for row in rows), np.float32),
        presence=column((row.sampling.presence_penalty for row in rows), np.float32),
        frequency=column((row.sampling.frequency_penalty for row in rows), np.float32),
        indptr=upload(_indptr(seen)),
        token_ids=upload(np.array([token for counts in seen for token in counts], np.int32)),
        output_counts=upload(np.array([count for counts in seen for count in counts.values()], np.int32)),
    )


def _seen_tokens(row: SampledRow) -> dict[int, int]:
    """Token id -> times in the output, over prompt and output."""
    counts = dict.fromkeys(row.token_ids[: row.num_prompt_tokens], 0)
    counts.update(Counter(row.token_ids[row.num_prompt_tokens :]))
    return counts


def _bias(rows: Sequence[SampledRow], eos_token_ids: frozenset[int], upload) -> Bias | None:
    biases = [_row_bias(row, eos_token_ids) for row in rows]
    if not any(biases):
        return None
    return Bias(
        indptr=upload(_indptr(biases)),
        token_ids=upload(np.array([token for bias in biases for token, _ in bias], np.int32)),
        values=upload(np.array([value for bias in biases for _, value in bias], np.float32)),
    )


def _row_bias(row: SampledRow, eos_token_ids: frozenset[int]) -> list[tuple[int, float]]:
    wish = row.sampling
    if len(row.token_ids) - row.num_prompt_tokens >= wish.min_tokens:
        return list(wish.logit_bias)
    forbidden = set(wish.stop_token_ids) | (frozenset() if wish.ignore_eos else eos_token_ids)
    return [pair for pair in wish.logit_bias if pair[0] not in forbidden] + [(i, -np.inf) for i in sorted(forbidden)]


def _indptr(ragged: Sequence) -> np.ndarray:
    return np.cumsum([0, *map(len, ragged)], dtype=np.int32)
