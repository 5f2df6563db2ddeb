"""How likely the tokens of prompts were: the logits of whole chunks, a few rows at a time, for they are wide."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.llama import Llama
from model.ops.interface import Array
from service.engine.step import Score, ScoredTokens, StepPlan, TokenLogprob

MAX_ROWS = 256
"""Of logits at once, 128 MiB for a vocabulary of 128K: as many as a large step samples from anyway."""


@dataclass(frozen=True, slots=True)
class ScoreFlight:
    """A part of a score on its way."""

    score: Score
    first: int  # position of the first token told of
    arrive: Callable[[], list[np.ndarray]]


def padded_rows(rows: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """rows int32[R] padded with zeros to the next of `sizes`, ascending; as it is if it is empty or longer than all.

    The product with the head runs only in sizes that were run at start. In others, cuBLASLt may have to load a kernel,
    which waits for the device: 15 to 70 ms under load.
    """
    place = bisect_left(sizes, len(rows))
    if not len(rows) or place == len(sizes):
        return rows
    return np.pad(rows, (0, sizes[place] - len(rows)))


def begin_scores(
    model: Llama, hidden: Array, plan: StepPlan, max_rows: int, logit_sizes: Sequence[int]
) -> list[ScoreFlight]:
    """Start to score what the plan asks for, of hidden [T, H], the rows of the plan's chunks in their order.

    `logit_sizes`: see `padded_rows`.
    """
    lengths = [chunk.length for chunk in plan.chunks]
    first_rows = dict(zip(map(id, plan.chunks), np.cumsum([0, *lengths]).tolist(), strict=False))
    step = min(MAX_ROWS, max_rows)
    return [
        _begin(model, hidden, score, first_rows[id(score.chunk)], start, min(start + step, score.stop), logit_sizes)
        for score in plan.scores
        for start in range(score.start, score.stop, step)
    ]


def _begin(
    model: Llama, hidden: Array, score: Score, first_row: int, start: int, stop: int, logit_sizes: Sequence[int]
) -> ScoreFlight:
    sequence, ops = score.chunk.sequence, model.ops
    rows = np.arange(start, stop, dtype=np.int32) + np.int32(first_row - score.chunk.start)
    targets = np.array(sequence.token_ids[start + 1 : stop + 1], np.int32)
    with ops.scratch():
        row_ids, token_ids = ops.upload_all([padded_rows(rows, logit_sizes), targets])
        logits = model.logits(hidden, row_ids)[: len(rows)]
        arrive = ops.download_later(ops.top_logprobs(logits, token_ids, sequence.sampling.prompt_logprobs))
    return ScoreFlight(score, start + 1, arrive)


def scored_tokens(flights: Sequence[ScoreFlight]) -> tuple[ScoredTokens, ...]:
    """Waits for them."""
    return tuple(ScoredTokens(flight.score, flight.first, _told(flight.arrive())) for flight in flights)


def _told(arrays: list[np.ndarray]) -> tuple[TokenLogprob, ...]:
    chosen, top_ids, top = (array.tolist() for array in arrays)
    return tuple(
        TokenLogprob(logprob, tuple(ids), tuple(best)) for logprob, ids, best in zip(chosen, top_ids, top, strict=True)
    )
