"""Admission, dispatch and drain, shared by HTTP routes, queue ingress and batches."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager

from service.config.settings import Settings
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.adapters import Adapters
from service.gateway.core.admission import Admission, TextStage
from service.gateway.core.back_pressure import BackPressure
from service.gateway.core.dispatcher import Reader, RequestDispatcher, read_to_end
from service.gateway.core.fleet import Fleet
from service.gateway.core.queue_writes import storage_limits
from service.gateway.core.refusals import draining
from service.gateway.core.request import GenerationRequest, OutlineReader
from service.gateway.core.request_store import RequestState, RequestStore
from service.gateway.core.response_stream import ResponseStream
from service.gateway.core.served_model import ServedModel
from service.gateway.core.spans import admission_span
from service.gateway.core.text_threads import TextThreads
from service.gateway.grammars.pool import GrammarPool
from service.observability.gateway_group import GatewayGroup
from service.observability.logs import fields
from service.observability.metrics import GatewayMetrics
from service.observability.tracing import NO_TRACING, Tracing
from service.queue.interface import GatewayQueue

log = logging.getLogger("quire.gateway")

DRAIN_POLL_S = 0.05
COMPILE_DRAIN_S = 1.0
"""Drain time for grammars that are compiling."""


class InferenceService:
    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        queue: GatewayQueue,
        read_outline: OutlineReader,
        tracing: Tracing = NO_TRACING,
        group: GatewayGroup | None = None,
    ) -> None:
        """`group`: the gateways on the same port."""
        self.settings = settings
        self.group = group
        self.tracing = tracing
        self.model = model
        self.queue = queue
        self.metrics = GatewayMetrics(model.name, group)
        self.threads = TextThreads()
        self.grammars = GrammarPool(model.tokens, asyncio.get_running_loop().time, on_result=self.metrics.count_grammar)
        self.grammars.start()
        self.fleet = Fleet(queue, model.name, asyncio.get_running_loop().time)
        self.pressure = BackPressure(settings, asyncio.get_running_loop().time)
        self.adapters = Adapters(model, queue, settings)
        text = TextStage(model, settings, self.threads, self.grammars)
        self.admission = Admission(text, queue, self.fleet, self.pressure, self.adapters)
        self.storage = storage_limits(settings)
        self.dispatcher = RequestDispatcher(model, queue, self.pressure, self.metrics, settings, tracing)
        self.request_store = RequestStore(
            queue, self.admission, self.dispatcher, self.threads, self.storage, read_outline
        )

    async def text_faults(self, within_s: float) -> list[str]:
        """Return the faults of text threads and grammar processes, one line each."""
        missing = [] if self.grammars.num_ready else ["no process that compiles grammars is ready"]
        if not await self.threads.responds(within_s):
            missing.append("the threads that read requests are busy")
        return missing

    async def admit(self, request: GenerationRequest, tenant: str, request_id: str | None = None) -> AcceptedRequest:
        with admission_span(self.tracing) as admitted:
            accepted = await self.admission.admit(request, tenant, request_id)
            admitted(accepted)
        return accepted

    async def accept(self, request: GenerationRequest, tenant: str, idempotency_key: str | None) -> AcceptedRequest:
        """Call `RequestStore.accept` in a span."""
        with admission_span(self.tracing) as admitted:
            accepted = await self.request_store.accept(request, tenant, idempotency_key)
            admitted(accepted)
        return accepted

    async def find(self, request_id: str, tenant: str) -> AcceptedRequest:
        return await self.request_store.find(request_id, tenant)

    async def state(self, accepted: AcceptedRequest, *, was_accepted: bool = False) -> RequestState:
        return await self.request_store.state(accepted, was_accepted=was_accepted)

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

    async def drain(self, at_once: asyncio.Event) -> None:
        """Refuse new requests, wait for open ones until `drain_timeout` or `at_once`, then end them."""
        self.admission.close()
        self.dispatcher.release_kept()
        compile_until_s = asyncio.get_running_loop().time() + COMPILE_DRAIN_S
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                while not at_once.is_set() and (self.dispatcher.num_open or self.grammars.num_waiting):
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
