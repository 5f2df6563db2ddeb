"""The interface of response builders, and the fields shared by OpenAI's responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.response_assembler import ChoiceDelta, Outcome
from service.gateway.core.served_model import ServedModel
from service.gateway.core.text_threads import TextThreads
from service.gateway.openai.json_objects import Json


@dataclass(frozen=True, kw_only=True)
class ResponseHeader:
    request_id: str
    public_id: str  # in chunks and whole responses
    created_s: int
    model: str
    fingerprint: str

    @classmethod
    def of(cls, model: ServedModel, accepted: AcceptedRequest) -> ResponseHeader:
        return cls(
            request_id=accepted.request_id,
            public_id=accepted.public_id,
            created_s=int(accepted.created_s),
            model=model.answer_name(accepted.request.model),
            fingerprint=model.fingerprint,
        )


class ResponseBuilder(Protocol):
    """Builds one response from its deltas, as one object or as chunks."""

    def whole(self, deltas: Sequence[ChoiceDelta], outcome: Outcome) -> Json: ...

    def chunks(self, delta: ChoiceDelta) -> list[Json]: ...

    def closing(self, outcome: Outcome) -> list[Json]: ...


MAX_CHARS_AT_ONCE = 2048
"""Tool calls in this much text are parsed in two milliseconds."""


async def build_whole(
    threads: TextThreads,
    accepted: AcceptedRequest,
    builder: ResponseBuilder,
    deltas: Sequence[ChoiceDelta],
    outcome: Outcome,
) -> Json:
    """Call `builder.whole`, off the event loop if it parses tool calls in a long text."""
    if accepted.request.tools is None or sum([len(delta.text) for delta in deltas]) <= MAX_CHARS_AT_ONCE:
        return builder.whole(deltas, outcome)
    return await threads.run(accepted.tenant, builder.whole, deltas, outcome)
