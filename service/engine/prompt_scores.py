"""How likely the tokens of prompts were: the logits of whole chunks, a few rows at a time, for they are wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.llama import Llama
from model.ops.interface import Array
from service.engine.plan import Score, ScoredTokens, StepPlan, TokenLogprob

MAX_ROWS = 256
"""Of logits at once, 128 MiB for a vocabulary of 128K: as many as a large step samples from anyway."""


@dataclass(frozen=True, slots=True)
class ScoreFlight:
    """A part of a score on its way."""

    score: Score
    first: int  # position of the first token told of
    arrive: Callable[[], list[np.ndarray]]


def begin_scores(model: Llama, hidden: Array, plan: StepPlan, max_rows: int) -> list[ScoreFlight]:
    """Start to score what the plan asks for, of hidden [T, H], the rows of the plan's chunks in their order."""
    lengths = [chunk.length for chunk in plan.chunks]
    first_rows = dict(zip(map(id, plan.chunks), np.cumsum([0, *lengths]).tolist(), strict=False))
    step = min(MAX_ROWS, max_rows)
    return [
        _begin(model, hidden, score, first_rows[id(score.chunk)], start, min(start + step, score.stop))
        for score in plan.scores
        for start in range(score.start, score.stop, step)
    ]


def _begin(model: Llama, hidden: Array, score: Score, first_row: int, start: int, stop: int) -> ScoreFlight:
    sequence, ops = score.chunk.sequence, model.ops
    rows = np.arange(start, stop, dtype=np.int32) + np.int32(first_row - score.chunk.start)
    targets = np.array(sequence.token_ids[start + 1 : stop + 1], np.int32)
    with ops.scratch():
        row_ids, token_ids = ops.upload_all([rows, targets])
        logits = model.logits(hidden, row_ids)
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
