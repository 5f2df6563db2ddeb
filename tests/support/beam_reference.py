"""Reference beam search: whole sequences, no cache, every token of the vocabulary a candidate.
service/engine/beam_search.py defines answer, score and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from model.sampling_params import SamplingParams

Answer = tuple[list[int], float, bool]
"""Output tokens, score, whether a stop id or completeness ended it."""


def search(
    prompt: Sequence[int],
    params: SamplingParams,
    stop_ids: frozenset[int],
    logprobs_after: Callable[[list[int]], Sequence[float]],
    is_complete: Callable[[list[int]], bool] = lambda output: False,
) -> list[Answer]:
    """Return all answers, best first. `logprobs_after`: log-probability of each token after these; nothing may follow
    an output that `is_complete`."""
    beam, longest = params.beam, params.max_tokens
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    answers: list[Answer] = []
    for length in range(1, longest + 1):
        rows = [np.array(logprobs_after([*prompt, *output]), np.float64) + total for total, output in beams]
        totals = np.concatenate(rows)
        following = []
        for place, offer in enumerate(np.argsort(-totals, kind="stable").tolist()):
            rank, token = divmod(offer, len(rows[0]))
            total, output = float(totals[offer]), [*beams[rank][1], token]
            if total == -math.inf or (place >= beam.width and (len(following) == beam.width or length == longest)):
                break
            is_stopped = token in stop_ids or is_complete(output)
            if not is_stopped and length < longest:
                following.append((total, output))
            elif place < beam.width:
                answers.append((output, total / length**beam.length_penalty, is_stopped))
        answers = sorted(answers, key=lambda answer: -answer[1])[: beam.width]
        beams = following[: beam.width]
        if not beams:
            break
        if len(answers) < beam.width:
            continue
        full = longest if beam.early_stopping == "never" and beam.length_penalty > 0 else length
        if beam.early_stopping is True or beams[0][0] / full**beam.length_penalty <= answers[-1][1]:
            break
    return answers
