"""Log-probabilities of prompt tokens, from the logits of whole chunks, few rows at a time because they are wide."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.families.llama import Llama
from model.ops.interface import Array
from service.engine.step import LogprobSpan, PromptLogprobs, StepPlan, TokenLogprob

MAX_ROWS = 256
"""Rows of logits at once, 128 MiB for a vocabulary of 128K: as many as a large step samples from anyway."""


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """A part of a span in flight."""

    span: LogprobSpan
    first: int  # position of the first scored token
    fetch: Callable[[], list[np.ndarray]]


def padded_rows(rows: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Pad rows int32[R] with zeros to the next of `sizes`, ascending; unchanged if empty or longer than all.

    The LM head runs only in sizes that were run at start. For another size cuBLASLt may have to load a kernel, which
    waits for the device: 15 to 70 ms under load.
    """
    index = bisect_left(sizes, len(rows))
    if not len(rows) or index == len(sizes):
        return rows
    return np.pad(rows, (0, sizes[index] - len(rows)))


def start_prompt_logprobs(
    model: Llama, hidden: Array, plan: StepPlan, max_rows: int, logit_sizes: Sequence[int]
) -> list[PendingLogprobs]:
    """Start to compute the plan's spans from hidden [T, H], the rows of its chunks in order.

    `logit_sizes`: see `padded_rows`.
    """
    lengths = [chunk.length for chunk in plan.chunks]
    first_rows = dict(zip(map(id, plan.chunks), np.cumsum([0, *lengths]).tolist(), strict=False))
    step = min(MAX_ROWS, max_rows)
    return [
        _start_span(model, hidden, span, first_rows[id(span.chunk)], start, min(start + step, span.stop), logit_sizes)
        for span in plan.logprob_spans
        for start in range(span.start, span.stop, step)
    ]


def _start_span(
    model: Llama, hidden: Array, span: LogprobSpan, first_row: int, start: int, stop: int, logit_sizes: Sequence[int]
) -> PendingLogprobs:
    sequence, ops = span.chunk.sequence, model.ops
    rows = np.arange(start, stop, dtype=np.int32) + np.int32(first_row - span.chunk.start)
    targets = np.array(sequence.token_ids[start + 1 : stop + 1], np.int32)
    with ops.scratch():
        row_ids, token_ids = ops.upload_all([padded_rows(rows, logit_sizes), targets])
        logits = model.logits(hidden, row_ids)[: len(rows)]
        fetch = ops.download_later(ops.top_logprobs(logits, token_ids, sequence.sampling.prompt_logprobs))
    return PendingLogprobs(span, start + 1, fetch)


def finish_prompt_logprobs(pending: Sequence[PendingLogprobs]) -> tuple[PromptLogprobs, ...]:
    """Wait for the results."""
    return tuple(PromptLogprobs(part.span, part.first, _token_logprobs(part.fetch())) for part in pending)


def _token_logprobs(arrays: list[np.ndarray]) -> tuple[TokenLogprob, ...]:
    chosen, top_ids, top = (array.tolist() for array in arrays)
    return tuple(
        TokenLogprob(logprob, tuple(ids), tuple(best)) for logprob, ids, best in zip(chosen, top_ids, top, strict=True)
    )
