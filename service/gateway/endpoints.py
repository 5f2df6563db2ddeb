"""The request reader and response builder of each endpoint."""

from __future__ import annotations

import msgspec

from service.gateway.anthropic.message_builder import message_builder_of
from service.gateway.anthropic.request_reader import read_messages
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.request import MESSAGES, RESPONSES, GenerationRequest
from service.gateway.core.served_model import ServedModel
from service.gateway.openai.choices_builder import choices_builder_of
from service.gateway.openai.request_reader import read_request
from service.gateway.openai.response_builder import ResponseBuilder
from service.gateway.openai.responses.builder import responses_builder_of


def read_outline(endpoint: str, outline: bytes) -> GenerationRequest:
    """Return the request of a `Source.outline`, which was valid when written."""
    fields = msgspec.json.decode(outline)
    return read_messages(fields) if endpoint == MESSAGES else read_request(endpoint, fields)


def builder_of(model: ServedModel, accepted: AcceptedRequest) -> ResponseBuilder:
    """Return the response builder of a request."""
    endpoint = accepted.request.endpoint
    if endpoint == MESSAGES:
        return message_builder_of(model, accepted)
    if endpoint == RESPONSES:
        return responses_builder_of(model, accepted)
    return choices_builder_of(model, accepted)
