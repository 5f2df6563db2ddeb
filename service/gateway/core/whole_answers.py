"""Whole answers off the event loop: their calls of functions are read by characters, and there may be many."""

from __future__ import annotations

from collections.abc import Sequence

from service.gateway.core.accepted_request import Ticket
from service.gateway.core.text_threads import TextThreads
from service.gateway.generation.response_assembler import Piece
from service.gateway.generation.response_stream import Outcome
from service.gateway.openai.answers import AnswerForm, Json

MAX_CHARS_AT_ONCE = 2048
"""Read in about two milliseconds."""


async def whole_answer(
    threads: TextThreads, ticket: Ticket, form: AnswerForm, pieces: Sequence[Piece], outcome: Outcome
) -> Json:
    """What `form.whole` returns."""
    if ticket.request.tools is None or sum([len(piece.text) for piece in pieces]) <= MAX_CHARS_AT_ONCE:
        return form.whole(pieces, outcome)
    return await threads.run(ticket.tenant, form.whole, pieces, outcome)
