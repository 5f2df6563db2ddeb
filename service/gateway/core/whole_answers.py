"""Whole answers off the event loop: their calls of functions are read by characters, and there may be many."""

from __future__ import annotations

from collections.abc import Sequence

from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.text_threads import TextThreads
from service.gateway.generation.response_assembler import ChoiceDelta
from service.gateway.generation.response_stream import Outcome
from service.gateway.openai.answers import Json, ResponseBuilder

MAX_CHARS_AT_ONCE = 2048
"""Read in about two milliseconds."""


async def whole_answer(
    threads: TextThreads,
    accepted: AcceptedRequest,
    builder: ResponseBuilder,
    deltas: Sequence[ChoiceDelta],
    outcome: Outcome,
) -> Json:
    """What `form.whole` returns."""
    if accepted.request.tools is None or sum([len(delta.text) for delta in deltas]) <= MAX_CHARS_AT_ONCE:
        return builder.whole(deltas, outcome)
    return await threads.run(accepted.tenant, builder.whole, deltas, outcome)
