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
    """One sequence about to get its next token, which will stand at `position`."""

    sampling: SamplingParams
    token_ids: Sequence[int]  # prompt and output so far; all of them where the sampling has penalties
    num_prompt_tokens: int
    position: int
    branch: int


def sampling_arrays(
    rows: Sequence[SampledRow],
    vocab_size: int,
    eos_token_ids: frozenset[int],
    upload_all: Callable[[Sequence[np.ndarray]], list[Array]],
) -> SamplingArrays:
    """Arrays for R = len(rows) rows, sent by `upload_all` to where the logits are, in one go."""
    columns, penalties, bias = _columns(rows, vocab_size), _penalties(rows), _bias(rows, eos_token_ids)
    sent = upload_all([*columns, *penalties, *bias])
    after_columns, after_penalties = len(columns), len(columns) + len(penalties)
    alternatives = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    return SamplingArrays(
        *sent[:after_columns],
        penalties=Penalties(*sent[after_columns:after_penalties]) if penalties else None,
        bias=Bias(*sent[after_penalties:]) if bias else None,
        num_logprobs=max(alternatives, default=0),
        with_logprobs=bool(alternatives),
    )


def _columns(rows: Sequence[SampledRow], vocab_size: int) -> list[np.ndarray]:
    """In the order of SamplingArrays' fields."""
    wishes = [row.sampling for row in rows]
    values = (
        ((wish.temperature for wish in wishes), np.float32),
        ((vocab_size if wish.top_k is None else min(wish.top_k, vocab_size) for wish in wishes), np.int32),
        ((wish.top_p for wish in wishes), np.float32),
        ((wish.min_p for wish in wishes), np.float32),
        ((wish.seed for wish in wishes), np.uint64),
        ((row.position for row in rows), np.uint32),
        ((row.branch for row in rows), np.uint32),
    )
    return [np.fromiter(column, dtype, len(rows)) for column, dtype in values]


def _penalties(rows: Sequence[SampledRow]) -> list[np.ndarray]:
    """In the order of Penalties' fields; empty where no row has any."""
    if not any(row.sampling.has_penalties for row in rows):
        return []
    seen = [_seen_tokens(row) if row.sampling.has_penalties else {} for row in rows]
    wishes = [(w.repetition_penalty, w.presence_penalty, w.frequency_penalty) for w in (row.sampling for row in rows)]
    return [
        *np.array(wishes, np.float32).T,
        _indptr(seen),
        np.array([token for counts in seen for token in counts], np.int32),
        np.array([count for counts in seen for count in counts.values()], np.int32),
    ]


def _seen_tokens(row: SampledRow) -> dict[int, int]:
    """Token id -> times in the output, over prompt and output."""
    counts = dict.fromkeys(row.token_ids[: row.num_prompt_tokens], 0)
    counts.update(Counter(row.token_ids[row.num_prompt_tokens :]))
    return counts


def _bias(rows: Sequence[SampledRow], eos_token_ids: frozenset[int]) -> list[np.ndarray]:
    """In the order of Bias' fields; empty where no row has any."""
    biases = [_row_bias(row, eos_token_ids) for row in rows]
    if not any(biases):
        return []
    return [
        _indptr(biases),
        np.array([token for bias in biases for token, _ in bias], np.int32),
        np.array([value for bias in biases for _, value in bias], np.float32),
    ]


def _row_bias(row: SampledRow, eos_token_ids: frozenset[int]) -> list[tuple[int, float]]:
    wish = row.sampling
    if row.position - row.num_prompt_tokens >= wish.min_tokens:
        return list(wish.logit_bias)
    forbidden = set(wish.stop_token_ids) | (frozenset() if wish.ignore_eos else eos_token_ids)
    return [pair for pair in wish.logit_bias if pair[0] not in forbidden] + [(i, -np.inf) for i in sorted(forbidden)]


def _indptr(ragged: Sequence) -> np.ndarray:
    return np.cumsum([0, *map(len, ragged)], dtype=np.int32)
