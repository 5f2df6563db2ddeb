"""Runs one batch line through its endpoint's own parsing and response format."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from service.errors import STORAGE_QUOTA_EXCEEDED, RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.refusals import refusal
from service.gateway.core.request import EMBEDDINGS, RESPONSES
from service.gateway.core.response_assembler import ChoiceDelta
from service.gateway.core.response_stream import ResponseStream
from service.gateway.core.service import InferenceService
from service.gateway.endpoints import builder_of
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_reader import parse_body
from service.gateway.openai.response_builder import build_whole
from service.gateway.openai.responses.request_reader import check_answered_calls, items_of, with_own_field_names
from service.gateway.openai.strict_json import decode_object
from service.gateway.routes.embeddings import embedding_answer, require_enabled
from service.gateway.routes.response_store import ResponseStore, check_size
from service.observability.logs import fields
from service.queue.interface import QueueUnavailable
from service.queue.records import StoredResponse

log = logging.getLogger("quire.batches")


class BatchRequests:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._store = ResponseStore(service)

    async def answer(self, endpoint: str, body: bytes, tenant: str, key: str) -> tuple[str, Json]:
        """Return the request's id and response. The same `key` returns the same response.

        Raises RequestError; RanLate, RanPastOwnTimeout and NotStored are special cases.
        """
        service = self._service
        if endpoint == EMBEDDINGS:
            require_enabled(service.settings)
        request = await parse_body(service.threads, endpoint, body, tenant)
        if request.stream or request.background:
            raise RequestError(400, "A batch request cannot stream or run in the background.")
        if endpoint == RESPONSES:
            await service.threads.run(tenant, _check_response, body)
        try:
            accepted = await service.accept(replace(request, background=True, is_batch=True), tenant, key)
        except RequestError as error:
            raise with_own_field_names(error) if endpoint in (RESPONSES, EMBEDDINGS) else error from None
        stream = None
        try:
            if accepted.jobs:
                await service.keep(accepted)
            async with service.view(accepted) as stream:
                deltas = await stream.read_all()
        except asyncio.CancelledError as cancelled:
            raise Interrupted(accepted) from cancelled
        except RequestError as error:
            if error.status == 504 and request.timeout_s is not None:
                raise RanPastOwnTimeout(error.status, error.message, error.type, code=error.code) from None
            if error.status == 504 and stream is not None and stream.outcome.completion_tokens:
                raise RanLate(error.status, error.message, error.type, code=error.code) from None
            raise
        plain = replace(accepted, request=replace(accepted.request, background=False))
        return accepted.request_id, await self._answer(plain, body, deltas, stream)

    async def _answer(
        self, accepted: AcceptedRequest, body: bytes, deltas: list[ChoiceDelta], stream: ResponseStream
    ) -> Json:
        service, endpoint = self._service, accepted.request.endpoint
        if endpoint == EMBEDDINGS:
            return await embedding_answer(service, accepted, stream)
        answer = await build_whole(
            service.threads, accepted, builder_of(service.model, accepted), deltas, stream.outcome
        )
        if endpoint == RESPONSES and answer["store"]:
            record = StoredResponse(
                response_id=answer["id"],
                tenant=accepted.tenant,
                created_s=accepted.created_s,
                answer=answer,
                input=await service.threads.run(accepted.tenant, _items, body),
            )
            try:
                await self._store.put(record)
            except RequestError as error:
                if error.code != STORAGE_QUOTA_EXCEEDED:
                    raise
                raise NotStored(error.status, error.message, error.type, code=error.code) from None
        return answer

    async def forget(self, request_id: str, tenant: str, key: str) -> None:
        """Drop the request's record, once its result is stored."""
        try:
            await self._service.request_store.forget(request_id, tenant, key)
        except QueueUnavailable:
            log.warning("the record of a batch's request stays for a while %s", fields(request=request_id))


class RanLate(RequestError):
    """The request timed out after its response had begun, so not just from waiting."""


class RanPastOwnTimeout(RequestError):
    """The request exceeded its own timeout, and would again."""


class NotStored(RequestError):
    """The response is complete, but the tenant's storage is full."""


class Interrupted(asyncio.CancelledError):
    """The batch stopped waiting for this request, which continues unless it is cancelled too."""

    def __init__(self, accepted: AcceptedRequest) -> None:
        super().__init__()
        self.accepted = accepted


def _check_response(body: bytes) -> None:
    asked = decode_object(body)
    if asked.get("previous_response_id") is not None:
        raise refusal("previous_response_id", "cannot be given in a batch, whose lines may be answered days later")
    items = items_of(asked["input"])
    check_answered_calls(items)
    if asked.get("store") is not False:
        check_size([], items)


def _items(body: bytes) -> list[Json]:
    return items_of(decode_object(body)["input"])
