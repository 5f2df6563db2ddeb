"""Queue ingress: serves jobs that foreign producers write to their ingress streams.

Jobs are validated and admitted like HTTP requests. A job waits while the queue is full. A draining gateway leaves its
entry to another gateway; any other outcome settles the entry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from service.errors import RequestError
from service.gateway.core.accepted_request import request_id_of
from service.gateway.core.refusals import incident, refusal
from service.gateway.core.request import ENDPOINTS, GenerationRequest
from service.gateway.core.service import InferenceService
from service.gateway.ingress.replies import RETRY_S, ChoiceReply, EntryTaken, ReplyWriter, persist
from service.gateway.openai.request_reader import read_fields
from service.gateway.openai.tool_calls import ToolCallWriter
from service.observability.logs import add_log_context, fields, log_context
from service.observability.tracing import read_traceparent, trace_id, use_traceparent
from service.queue.codec import INGRESS_ID, LIMITS, WireError, decode
from service.queue.interface import IngressEntry, QueueUnavailable
from service.queue.keys import INGRESS_KEEP_S
from service.queue.messages import IngressJob
from service.typed_decoding import decode_msgpack

log = logging.getLogger("quire.gateway")

Result = TypeVar("Result")

MAX_OPEN_JOBS = 256
MAX_OPEN_BYTES = 32 << 20
FETCH_AT_ONCE = 8
"""Small, because an entry is read whole before it can be refused, and Redis does not limit its length."""
FETCH_WAIT_S = 0.5


class QueueIngress:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._stopping = False
        self._open: dict[asyncio.Task[None], IngressEntry] = {}

    async def run(self) -> None:
        """Serve until `stop`, then return once no job is open here. Cancelling drops all open jobs."""
        keeping, is_away = asyncio.create_task(self._keep()), False
        try:
            while not self._stopping:
                try:
                    await self._fetch()
                    is_away = False
                except QueueUnavailable as error:
                    if not is_away:
                        log.warning("no producers' entries fetched, retrying: %s", error)
                    is_away = True
                    await asyncio.sleep(RETRY_S)
                except Exception as error:
                    incident(error, "queue")
                    await asyncio.sleep(RETRY_S)
            if self._open:
                await asyncio.wait(self._open)
        finally:
            for task in (keeping, *self._open):
                task.cancel()

    async def _keep(self) -> None:
        """Renew open entries; stop serving entries that another gateway took over."""
        while True:
            await asyncio.sleep(INGRESS_KEEP_S)
            try:
                lost = await self._service.queue.ingress.renew_entries()
            except QueueUnavailable:
                continue
            names = {(entry.producer, entry.entry_id) for entry in lost}
            for task, entry in self._open.items():
                if (entry.producer, entry.entry_id) in names:
                    log.warning("another gateway has taken %s", fields(producer=entry.producer, entry=entry.entry_id))
                    task.cancel()

    async def _fetch(self) -> None:
        room = min(MAX_OPEN_JOBS - len(self._open), FETCH_AT_ONCE)
        if room == 0 or sum(len(entry.payload) for entry in self._open.values()) >= MAX_OPEN_BYTES:
            await asyncio.wait(self._open, timeout=FETCH_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            return
        for entry in await self._service.queue.ingress.fetch_entries(
            self._service.settings.producers, room, FETCH_WAIT_S
        ):
            task = asyncio.create_task(self._serve(entry))
            self._open[task] = entry
            task.add_done_callback(self._open.pop)

    def stop(self) -> None:
        """Fetch no more entries. Open ones end, or are left to another gateway."""
        self._stopping = True

    async def _serve(self, entry: IngressEntry) -> None:
        try:
            replies = ReplyWriter(self._service, entry, await self._read_off_loop(entry, _reply_id, entry))
            with log_context(producer=entry.producer, entry=entry.entry_id):
                await self._serve_with(entry, replies)
        finally:
            self._service.queue.ingress.release_entry(entry)

    async def _serve_with(self, entry: IngressEntry, replies: ReplyWriter) -> None:
        try:
            if await self._answer(entry, replies):
                await self._persistently(lambda: self._service.queue.ingress.settle_entry(entry))
        except EntryTaken:
            log.warning("another gateway has taken %s", fields(producer=entry.producer, entry=entry.entry_id))
        except QueueUnavailable:
            log.warning("ingress entry left unsettled")
        except Exception as error:
            incident(error, "queue")

    async def _answer(self, entry: IngressEntry, replies: ReplyWriter) -> bool:
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + self._service.settings.request_timeout
        try:
            if not await replies.begin():
                return True
        except RequestError as error:
            await replies.fail(error)
            return True
        while True:
            try:
                replies.start_over()
                await self._generate(entry, replies)
                return True
            except RequestError as error:
                if error.status == 503 and self._service.admission.draining:
                    return False
                wait_s = error.retry_after_s
                if wait_s is None or loop.time() + wait_s > give_up_at_s:
                    await replies.fail(error)
                    return True
                await asyncio.sleep(wait_s)
            except (QueueUnavailable, EntryTaken):
                raise
            except Exception as error:
                await replies.fail(incident(error, "queue"))
                return True

    async def _generate(self, entry: IngressEntry, replies: ReplyWriter) -> None:
        try:
            if not entry.payload:
                raise WireError("field m of the entry is missing or empty")
            job = await self._read_off_loop(entry, decode, IngressJob, entry.payload)
        except WireError as error:
            log.info("ingress entry refused: %s", error)
            message = f"The entry is not a valid job message: {error}."
            raise RequestError(400, message, code="invalid_message") from None
        traceparent = read_traceparent(job.traceparent)
        add_log_context(trace=trace_id(traceparent))
        with use_traceparent(traceparent):
            await self._answer_job(job, entry, replies)

    async def _answer_job(self, job: IngressJob, entry: IngressEntry, replies: ReplyWriter) -> None:
        request = await self._read(job, entry.producer)
        # The same id in every gateway, so that the next gateway finds the same jobs and events.
        request_id = request_id_of("ingress", entry.producer, entry.entry_id)
        accepted = await self._service.admit(request, entry.producer, request_id)
        options = self._service.model.call_options(request.tools)
        writer = None if options is None else ToolCallWriter(accepted.request_id, options)
        choices = {index: ChoiceReply(index, writer) for index in range(request.num_choices)}
        async with self._service.open(accepted, is_shared=True) as stream:
            async for deltas in stream:
                for delta in deltas:
                    choice = choices[delta.index]
                    choice.push(delta)
                    if request.stream and delta.finish_reason is None:
                        await replies.send_next(choice)
        # Within a grammar, fewer beams may end than were requested.
        await replies.finish(
            [choice for choice in choices.values() if choice.finish_reason is not None], stream.outcome
        )

    async def _read(self, job: IngressJob, producer: str) -> GenerationRequest:
        if job.endpoint not in ENDPOINTS:
            raise refusal("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        request = await self._service.threads.run(producer, read_fields, job.endpoint, job.body)
        for name in ("resumable", "background"):
            if getattr(request, name):
                raise refusal(name, "is for HTTP; a reply stream needs no connected client")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(request.sampling, name) is not None:
                raise refusal(name, "are not carried by the queue's replies")
        for name, is_asked in (
            ("echo", request.echo),
            ("return_token_ids", request.has_token_ids),
            ("stream_options.continuous_usage_stats", request.usage_in_chunks),
        ):
            if is_asked:
                raise refusal(name, "is not carried by the queue's replies")
        return request

    async def _read_off_loop(self, entry: IngressEntry, read: Callable[..., Result], *args: Any) -> Result:
        return await self._service.threads.run_sized(len(entry.payload), entry.producer, read, *args)

    async def _persistently(self, attempt: Callable[[], Awaitable[None]]) -> None:
        await persist(attempt, self._service.settings.request_timeout)


class _Named(msgspec.Struct):
    id: str


def _reply_id(entry: IngressEntry) -> str:
    """Return the producer's id of the job, or the entry's id if the message is broken."""
    try:
        if len(entry.payload) <= LIMITS[IngressJob].max_bytes:
            name = decode_msgpack(entry.payload, _Named).id
            if INGRESS_ID.fullmatch(name):
                return name
    except (ValueError, RecursionError):
        return entry.entry_id
    return entry.entry_id
