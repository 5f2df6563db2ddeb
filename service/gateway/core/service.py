"""The inference service that HTTP routes, the queue ingress and batches share: admission, dispatch, drain."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.admission import Admission, draining
from service.gateway.core.back_pressure import BackPressure
from service.gateway.core.dispatcher import Reader, RequestDispatcher, read_to_end
from service.gateway.core.fleet import Fleet
from service.gateway.core.request_store import RequestStore
from service.gateway.core.spans import admission
from service.gateway.core.storage import storage_limits
from service.gateway.core.text_threads import TextThreads
from service.gateway.generation.request import RESPONSES, GenerationRequest
from service.gateway.generation.response_stream import ResponseStream
from service.gateway.generation.served_model import ServedModel
from service.gateway.grammars.pool import GrammarPool
from service.gateway.openai.answers import (
    ChatBuilder,
    CompletionBuilder,
    Json,
    ResponseBuilder,
    ResponseHeader,
    ResponseOptions,
)
from service.gateway.openai.response_form import ResponsesBuilder, responses_options
from service.gateway.openai.strict_json import decode_object
from service.gateway.openai.validator import read_request, source_of
from service.observability.logs import fields
from service.observability.metrics import GatewayMetrics
from service.observability.tracing import NO_TRACING, Tracing
from service.queue.interface import GatewayQueue

log = logging.getLogger("quire.gateway")

SMALL_BODY_BYTES = 8 << 10
"""What is read in a millisecond at most is read at once: the way to a thread and back takes longer."""
DRAIN_POLL_S = 0.05
COMPILE_DRAIN_S = 1.0
"""For grammars that requests wait for, of the drain time."""


class InferenceService:
    """One per gateway. Owns the threads that parse and tokenise, so that no request stops the event loop."""

    def __init__(
        self, settings: Settings, model: ServedModel, queue: GatewayQueue, feed: str, tracing: Tracing = NO_TRACING
    ) -> None:
        self.settings = settings
        self.tracing = tracing
        self.model = model
        self.queue = queue
        self.metrics = GatewayMetrics(model.name)
        self.threads = TextThreads()
        self.grammars = GrammarPool(model.tokens, asyncio.get_running_loop().time, on_result=self.metrics.count_grammar)
        self.grammars.start()
        self.fleet = Fleet(queue, model.name, asyncio.get_running_loop().time)
        self.pressure = BackPressure(settings, asyncio.get_running_loop().time)
        self.admission = Admission(model, queue, self.fleet, self.pressure, settings, feed, self.threads, self.grammars)
        self.storage = storage_limits(settings)
        self.dispatcher = RequestDispatcher(
            model, queue, self.pressure, self.metrics, settings.resume_grace, tracing, self.storage
        )
        self.request_store = RequestStore(queue, self.admission, self.dispatcher, self.threads, self.storage)

    async def missing_text_half(self, within_s: float) -> list[str]:
        """What of the threads and processes for text does not answer in time."""
        missing = [] if self.grammars.num_ready else ["no process that compiles grammars is ready"]
        if not await self.threads.answer(within_s):
            missing.append("the threads that read requests are busy")
        return missing

    async def read(self, endpoint: str, body: bytes | Mapping[str, Any], tenant: str) -> GenerationRequest:
        """The validated request in `body`: JSON, or what a queue entry or a line holds. Raises RequestError (400)."""
        if not isinstance(body, bytes):
            return await self.threads.run(tenant, _read, endpoint, body)
        if len(body) <= SMALL_BODY_BYTES:
            return _read_json(endpoint, body)
        return await self.threads.run(tenant, _read_json, endpoint, body)

    async def admit(self, request: GenerationRequest, tenant: str, request_id: str | None = None) -> AcceptedRequest:
        with admission(self.tracing) as admitted:
            accepted = await self.admission.admit(request, tenant, request_id)
            admitted(accepted)
        return accepted

    async def accept(self, request: GenerationRequest, tenant: str, idempotency_key: str | None) -> AcceptedRequest:
        """Like `admit`, but the request can be found again. Without jobs if an earlier request had its key."""
        with admission(self.tracing) as admitted:
            accepted = await self.request_store.accept(request, tenant, idempotency_key)
            admitted(accepted)
        return accepted

    async def find(self, request_id: str, tenant: str) -> AcceptedRequest:
        return await self.request_store.find(request_id, tenant)

    async def state(self, accepted: AcceptedRequest, *, was_accepted: bool = False) -> Json:
        return await self.request_store.state(accepted, self.builder(accepted), was_accepted=was_accepted)

    async def cancel(self, accepted: AcceptedRequest) -> None:
        await self.request_store.cancel(accepted)

    async def keep(self, accepted: AcceptedRequest, read: Reader = read_to_end) -> None:
        await self.dispatcher.keep(accepted, read)

    def view(self, accepted: AcceptedRequest) -> AbstractAsyncContextManager[ResponseStream]:
        return self.dispatcher.view(accepted)

    def open(
        self, accepted: AcceptedRequest, *, is_shared: bool = False
    ) -> AbstractAsyncContextManager[ResponseStream]:
        return self.dispatcher.open(accepted, is_shared=is_shared)

    def builder(self, accepted: AcceptedRequest) -> ResponseBuilder:
        """How the answer of this request is worded."""
        request, header = accepted.request, self._header(accepted)
        if request.endpoint == RESPONSES:
            return self.responses_builder(accepted)
        options = ResponseOptions(
            logprobs=request.sampling.logprobs is not None,
            tokens_as_ids=request.tokens_as_ids,
            skip_special_tokens=request.hides_special_tokens,
            begins_a_text=request.begins_a_text,
            num_choices=request.num_choices,
            prompt_texts=accepted.prompt_texts,
            first_ids=accepted.first_ids,
            prompt_logprobs=request.has_prompt_logprobs_field,
            usage=request.include_usage,
            usage_in_chunks=request.usage_in_chunks,
            num_prompt_tokens=sum(accepted.num_prompt_tokens),
            calls=self.model.call_options(request.tools),
        )
        return (ChatBuilder if request.is_chat else CompletionBuilder)(header, self.model.tokenizer, options)

    def responses_builder(self, accepted: AcceptedRequest) -> ResponsesBuilder:
        """The same for a request that was made at RESPONSES."""
        calls = self.model.call_options(accepted.request.tools)
        options = responses_options(accepted.request, self.model.defaults, calls)
        return ResponsesBuilder(self._header(accepted), self.model.tokenizer, options)

    def _header(self, accepted: AcceptedRequest) -> ResponseHeader:
        return ResponseHeader(
            job_id=accepted.request_id,
            created_s=int(accepted.created_s),
            model=self.model.name,
            fingerprint=self.model.fingerprint,
        )

    async def drain(self) -> None:
        """Refuses what comes, and gives what is open its time to end; then ends it."""
        self.admission.close()
        self.dispatcher.let_go()
        compile_until_s = asyncio.get_running_loop().time() + COMPILE_DRAIN_S
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                while self.dispatcher.num_open or self.grammars.num_waiting:
                    if asyncio.get_running_loop().time() > compile_until_s:
                        self.grammars.refuse(draining())
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("drain time is over %s", fields(num_open=self.dispatcher.num_open))
            self.dispatcher.end_all()
        self.grammars.refuse(draining())

    async def close(self) -> None:
        await self.dispatcher.close()
        self.threads.close()
        await self.grammars.close()


def incident(error: BaseException, where: str) -> RequestError:
    """A bug: its traceback goes to the log under a number, and only the number goes to the client."""
    number = secrets.token_hex(6)
    log.error("bug %s", fields(incident=number, where=where), exc_info=error)
    return RequestError(500, f"Internal error, incident {number}.", "server_error", code="internal_error")


def _read_json(endpoint: str, body: bytes) -> GenerationRequest:
    return _read(endpoint, decode_object(body))


def _read(endpoint: str, fields: Mapping[str, Any]) -> GenerationRequest:
    request = read_request(endpoint, fields)
    return replace(request, source=source_of(request, fields))
