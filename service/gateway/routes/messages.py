"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from aiohttp import web

from service.gateway.anthropic.message_builder import error_json, message_builder_of
from service.gateway.anthropic.request_reader import read_count_body, read_messages_body
from service.gateway.core.request import MESSAGES
from service.gateway.core.served_model import ServedModel
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import BODY_RESERVATION, TENANT, json_response, read_body
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.json_objects import Json
from service.gateway.openai.response_builder import build_whole
from service.gateway.routes.generation import (
    Generation,
    OpenStream,
    accept,
    answer_new,
    as_request_error,
    idempotency_key,
    last_event_id,
)

COUNT_TOKENS = f"{MESSAGES}/count_tokens"


class Messages:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def create(self, http: web.Request) -> web.StreamResponse:
        key, after = idempotency_key(http), last_event_id(http)
        body, tenant = await read_body(http), http[TENANT]
        self._service.pressure.check_unread(tenant)
        request = await self._service.threads.run_sized(len(body), tenant, read_messages_body, body)
        accepted = await accept(http, self._service, request, key)
        http[BODY_RESERVATION].shrink(len(accepted.request.source.outline))
        return await answer_new(http, MessageGeneration(self._service, accepted), after)

    async def count_tokens(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        model, loaded = self._service.model, await self._service.adapters.loaded_names()
        return json_response(
            {"input_tokens": await self._service.threads.run(http[TENANT], _count_tokens, model, body, loaded)}
        )


class MessageGeneration(Generation):
    """Serves one accepted request in Anthropic's JSON."""

    async def background_answer(self) -> web.StreamResponse | None:
        return None  # no field requests it

    async def whole(self, opened: OpenStream) -> Json:
        async with opened as deltas:
            parts = await deltas.read_all()
        builder = message_builder_of(self.service.model, self.accepted)
        return await build_whole(self.service.threads, self.accepted, builder, parts, deltas.outcome)

    async def send(self, sse: SseStream, opened: OpenStream) -> None:
        try:
            await self._send_events(sse, opened)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not sse.started:
                raise
            if not sse.is_done:
                failed = error_json(as_request_error(error), self.accepted.request_id)
                await sse.send_unnumbered([failed])

    async def _send_events(self, sse: SseStream, opened: OpenStream) -> None:
        builder = message_builder_of(self.service.model, self.accepted)
        async with opened as deltas, sse.kept_alive():
            async for arrived in deltas:
                chunks = (chunk for delta in arrived for chunk in builder.chunks(delta))
                await sse.send(chunks, more=deltas.has_ended)
            await sse.send(builder.closing(deltas.outcome))
            sse.is_done = True


def _count_tokens(model: ServedModel, data: bytes, adapters: Container[str]) -> int:
    name, prompt = read_count_body(data)
    model.require(name, adapters)
    return len(model.encode(prompt))
