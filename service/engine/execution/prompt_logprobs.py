"""Log-probabilities of prompt tokens, a few wide rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from model.step_inputs import LogprobRows
from service.engine.step import LogprobSpan, PromptLogprobs, TokenLogprob

MAX_ROWS = 256
"""Rows of logits at once: 128 MiB with a vocabulary of 128K."""


class PlannedLogprobs(NamedTuple):
    span: LogprobSpan
    first: int  # position
    rows: LogprobRows


def plan_prompt_logprobs(
    spans: Sequence[LogprobSpan], first_rows: Mapping[int, int], max_rows: int
) -> list[PlannedLogprobs]:
    """Return the rows to score, in parts of at most `max_rows`."""
    step = min(MAX_ROWS, max_rows)
    return [
        _planned(span, first_rows[id(span.chunk)], start, min(start + step, span.stop))
        for span in spans
        for start in range(span.start, span.stop, step)
    ]


def read_prompt_logprobs(
    planned: Sequence[PlannedLogprobs], fetches: Sequence[Callable[[], list[np.ndarray]]]
) -> tuple[PromptLogprobs, ...]:
    return tuple(
        PromptLogprobs(part.span, part.first, _token_logprobs(fetch()))
        for part, fetch in zip(planned, fetches, strict=True)
    )


def _planned(span: LogprobSpan, first_row: int, start: int, stop: int) -> PlannedLogprobs:
    sequence = span.chunk.sequence
    rows = np.arange(start, stop, dtype=np.int32) + np.int32(first_row - span.chunk.start)
    targets = np.array(sequence.token_ids[start + 1 : stop + 1], np.int32)
    return PlannedLogprobs(span, start + 1, LogprobRows(rows, targets, sequence.sampling.prompt_logprobs or 0))


def _token_logprobs(arrays: list[np.ndarray]) -> tuple[TokenLogprob, ...]:
    chosen, top_ids, top = (array.tolist() for array in arrays)
    return tuple(
        TokenLogprob(logprob, tuple(ids), tuple(best)) for logprob, ids, best in zip(chosen, top_ids, top, strict=True)
    )
