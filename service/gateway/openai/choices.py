"""How many answers a body asks for, and how they are found: sampled side by side, the best of more, or beams."""

from __future__ import annotations

from dataclasses import dataclass

from model.sampling_params import BeamSearch
from service.gateway.generation.refusals import refusal
from service.gateway.openai.bodies import MAX_BEAM_WIDTH, GenerationBody

_SAMPLING_IN_BEAMS = {"temperature": (0, 1), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
"""Values of sampling's fields that ask for nothing that beam search does not do."""


@dataclass(frozen=True)
class Choices:
    n: int
    best_of: int  # 1 with beams
    beam: BeamSearch | None


def read_choices(body: GenerationBody) -> Choices:
    """Ranges were checked. Raises RequestError (400) for fields that contradict each other."""
    if body.use_beam_search:
        return _beams(body)
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) != neutral:
            raise refusal(name, "needs 'use_beam_search' to be true")
    best_of = body.n if body.best_of is None else body.best_of
    if best_of < body.n:
        raise refusal("best_of", "must not be less than 'n'")
    return Choices(body.n, best_of, None)


def _beams(body: GenerationBody) -> Choices:
    for name, neutral in _SAMPLING_IN_BEAMS.items():
        if getattr(body, name) not in (None, *neutral):
            raise refusal(name, "asks for sampling, and beam search does not sample")
    if isinstance(body.early_stopping, str) and body.early_stopping != "never":
        raise refusal("early_stopping", "must be true, false or 'never'")
    # vLLM takes best_of, or n, for the width; whoever names the width need not.
    width = body.beam_width or body.best_of or body.n
    if body.best_of not in (None, width):
        raise refusal("best_of", "contradicts 'beam_width'")
    if width > MAX_BEAM_WIDTH:
        raise refusal("beam_width", f"must be between 1 and {MAX_BEAM_WIDTH}")
    if body.n > width:
        raise refusal("n", "must not exceed 'beam_width'")
    return Choices(
        body.n,
        1,
        BeamSearch(width=width, length_penalty=body.length_penalty, early_stopping=body.early_stopping),
    )
