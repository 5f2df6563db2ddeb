"""What both doors open into: one validator, one admission, one relay, and the words for what goes wrong."""

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
from service.gateway.core.accepted_request import Ticket
from service.gateway.core.admission import Admission, draining
from service.gateway.core.back_pressure import BackPressure
from service.gateway.core.dispatcher import Reader, Relay, read_to_end
from service.gateway.core.fleet import Fleet
from service.gateway.core.request_store import Requests
from service.gateway.core.spans import admission
from service.gateway.core.storage import storage_limits
from service.gateway.core.text_threads import TextThreads
from service.gateway.generation.request import RESPONSES, Request
from service.gateway.generation.response_stream import Run
from service.gateway.generation.served_model import ServedModel
from service.gateway.grammars.pool import GrammarPool
from service.gateway.openai.answers import AnswerForm, ChatForm, CompletionForm, Heading, Json, Wording
from service.gateway.openai.response_form import ResponseForm, wording_of
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


class Hall:
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
        self.grammars = GrammarPool(model.tokens, asyncio.get_running_loop().time, on_result=self.metrics.compiled)
        self.grammars.start()
        self.fleet = Fleet(queue, model.name, asyncio.get_running_loop().time)
        self.pressure = BackPressure(settings, asyncio.get_running_loop().time)
        self.admission = Admission(model, queue, self.fleet, self.pressure, settings, feed, self.threads, self.grammars)
        self.storage = storage_limits(settings)
        self.relay = Relay(model, queue, self.pressure, self.metrics, settings.resume_grace, tracing, self.storage)
        self.requests = Requests(queue, self.admission, self.relay, self.threads, self.storage)

    async def missing_text_half(self, within_s: float) -> list[str]:
        """What of the threads and processes for text does not answer in time."""
        missing = [] if self.grammars.num_ready else ["no process that compiles grammars is ready"]
        if not await self.threads.answer(within_s):
            missing.append("the threads that read requests are busy")
        return missing

    async def read(self, endpoint: str, body: bytes | Mapping[str, Any], tenant: str) -> Request:
        """The validated request in `body`: JSON, or what a queue entry or a line holds. Raises RequestError (400)."""
        if not isinstance(body, bytes):
            return await self.threads.run(tenant, _read, endpoint, body)
        if len(body) <= SMALL_BODY_BYTES:
            return _read_json(endpoint, body)
        return await self.threads.run(tenant, _read_json, endpoint, body)

    async def admit(self, request: Request, tenant: str, request_id: str | None = None) -> Ticket:
        with admission(self.tracing) as admitted:
            ticket = await self.admission.admit(request, tenant, request_id)
            admitted(ticket)
        return ticket

    async def accept(self, request: Request, tenant: str, idempotency_key: str | None) -> Ticket:
        """Like `admit`, but the request can be found again. A ticket without jobs: it came before under its key."""
        with admission(self.tracing) as admitted:
            ticket = await self.requests.accept(request, tenant, idempotency_key)
            admitted(ticket)
        return ticket

    async def find(self, request_id: str, tenant: str) -> Ticket:
        return await self.requests.find(request_id, tenant)

    async def state(self, ticket: Ticket, *, was_accepted: bool = False) -> Json:
        return await self.requests.state(ticket, self.form(ticket), was_accepted=was_accepted)

    async def cancel(self, ticket: Ticket) -> None:
        await self.requests.cancel(ticket)

    async def keep(self, ticket: Ticket, read: Reader = read_to_end) -> None:
        await self.relay.keep(ticket, read)

    def view(self, ticket: Ticket) -> AbstractAsyncContextManager[Run]:
        return self.relay.view(ticket)

    def open(self, ticket: Ticket, *, is_shared: bool = False) -> AbstractAsyncContextManager[Run]:
        return self.relay.open(ticket, is_shared=is_shared)

    def form(self, ticket: Ticket) -> AnswerForm:
        """How the answer of this request is worded."""
        request, heading = ticket.request, self._heading(ticket)
        if request.endpoint == RESPONSES:
            return self.response_form(ticket)
        wording = Wording(
            logprobs=request.sampling.logprobs is not None,
            tokens_as_ids=request.tokens_as_ids,
            skip_special_tokens=request.hides_special_tokens,
            begins_a_text=request.begins_a_text,
            num_choices=request.num_choices,
            prompt_texts=ticket.prompt_texts,
            first_ids=ticket.first_ids,
            prompt_logprobs=request.tells_prompt_logprobs,
            usage=request.include_usage,
            usage_in_chunks=request.usage_in_chunks,
            num_prompt_tokens=sum(ticket.num_prompt_tokens),
            calls=self.model.call_wording(request.tools),
        )
        return (ChatForm if request.is_chat else CompletionForm)(heading, self.model.tokenizer, wording)

    def response_form(self, ticket: Ticket) -> ResponseForm:
        """The same for a request that was made at RESPONSES."""
        calls = self.model.call_wording(ticket.request.tools)
        wording = wording_of(ticket.request, self.model.defaults, calls)
        return ResponseForm(self._heading(ticket), self.model.tokenizer, wording)

    def _heading(self, ticket: Ticket) -> Heading:
        return Heading(
            job_id=ticket.request_id,
            created_s=int(ticket.created_s),
            model=self.model.name,
            fingerprint=self.model.fingerprint,
        )

    async def drain(self) -> None:
        """Refuses what comes, and gives what is open its time to end; then ends it."""
        self.admission.close()
        self.relay.let_go()
        compile_until_s = asyncio.get_running_loop().time() + COMPILE_DRAIN_S
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                while self.relay.num_open or self.grammars.num_waiting:
                    if asyncio.get_running_loop().time() > compile_until_s:
                        self.grammars.refuse(draining())
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("drain time is over %s", fields(num_open=self.relay.num_open))
            self.relay.end_all()
        self.grammars.refuse(draining())

    async def close(self) -> None:
        await self.relay.close()
        self.threads.close()
        await self.grammars.close()


def incident(error: BaseException, where: str) -> RequestError:
    """A bug: its traceback goes to the log under a number, and only the number goes to the client."""
    number = secrets.token_hex(6)
    log.error("bug %s", fields(incident=number, where=where), exc_info=error)
    return RequestError(500, f"Internal error, incident {number}.", "server_error", code="internal_error")


def _read_json(endpoint: str, body: bytes) -> Request:
    return _read(endpoint, decode_object(body))


def _read(endpoint: str, fields: Mapping[str, Any]) -> Request:
    request = read_request(endpoint, fields)
    return replace(request, source=source_of(request, fields))
