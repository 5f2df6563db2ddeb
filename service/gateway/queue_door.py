"""The queue door: serves the jobs that foreign producers write to their ingress streams.

A job passes the same validator, admission and text code as an HTTP request. What only waiting can help (a full queue, a
drain) is waited for or left to the next gateway; everything else is answered once, and the entry is settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from service.errors import RequestError
from service.gateway.admission import job_id_of
from service.gateway.hall import Hall, incident
from service.gateway.openai_answers import error_object
from service.gateway.openai_bodies import refusal
from service.gateway.request import ENDPOINTS, Request
from service.gateway.run import Outcome
from service.logs import about, also_about, fields
from service.tracing import below, read_traceparent, trace_id
from service.wire.broker import BrokerUnavailable, IngressEntry
from service.wire.codec import INGRESS_ID, LIMITS, WireError, decode, encode
from service.wire.keys import INGRESS_KEEP_S
from service.wire.messages import IngressJob, Reply, Usage

log = logging.getLogger("quire.gateway")

MAX_OPEN_JOBS = 256
FETCH_WAIT_S = 0.5
RETRY_S = 1.0
MAX_REPLY_CHARS = 128 << 10
"""A reply message is bounded in bytes; a longer text is told in several."""


class QueueDoor:
    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._stopping = False
        self._open: dict[asyncio.Task[None], IngressEntry] = {}

    async def run(self) -> None:
        """Serves until `stop`, and returns when no job is open here any more; cancelled, it lets go of them all."""
        keeping = asyncio.create_task(self._keep())
        try:
            while not self._stopping:
                try:
                    await self._take_some()
                except BrokerUnavailable:
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
        """Others leave the open entries alone while this goes on; what they have taken nevertheless is theirs."""
        while True:
            await asyncio.sleep(INGRESS_KEEP_S)
            try:
                lost = await self._hall.broker.keep_ingress()
            except BrokerUnavailable:
                continue
            names = {(entry.producer, entry.entry_id) for entry in lost}
            for task, entry in self._open.items():
                if (entry.producer, entry.entry_id) in names:
                    log.warning("another gateway has taken %s", fields(producer=entry.producer, entry=entry.entry_id))
                    task.cancel()

    async def _take_some(self) -> None:
        room = MAX_OPEN_JOBS - len(self._open)
        if room == 0:
            await asyncio.wait(self._open, timeout=FETCH_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            return
        for entry in await self._hall.broker.fetch_ingress(self._hall.settings.producers, room, FETCH_WAIT_S):
            task = asyncio.create_task(self._serve(entry))
            self._open[task] = entry
            task.add_done_callback(self._open.pop)

    def stop(self) -> None:
        """Takes no more entries. Those that are open end, or stay unsettled for the next gateway."""
        self._stopping = True

    async def _serve(self, entry: IngressEntry) -> None:
        answer = _Answer(self._hall, entry.producer, _reply_id(entry))
        with about(producer=entry.producer, entry=entry.entry_id):
            await self._serve_with(entry, answer)

    async def _serve_with(self, entry: IngressEntry, answer: _Answer) -> None:
        try:
            if await self._answer(entry, answer):
                await self._persistently(lambda: self._hall.broker.settle_ingress(entry))
        except BrokerUnavailable:
            log.warning("ingress entry left unsettled")
        except Exception as error:
            incident(error, "queue")

    async def _answer(self, entry: IngressEntry, answer: _Answer) -> bool:
        """Whether the entry has its final reply."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + self._hall.settings.request_timeout
        if entry.was_left and await answer.has_ended():
            return True
        while True:
            try:
                await self._generate(entry, answer)
                return True
            except RequestError as error:
                if error.status == 503 and self._hall.admission.draining:
                    return False
                wait_s = error.retry_after_s
                if wait_s is None or answer.num_told or loop.time() + wait_s > give_up_at_s:
                    await answer.fail(error)
                    return True
                await asyncio.sleep(wait_s)
            except BrokerUnavailable:
                raise
            except Exception as error:
                await answer.fail(incident(error, "queue"))
                return True

    async def _generate(self, entry: IngressEntry, answer: _Answer) -> None:
        try:
            job = decode(IngressJob, entry.payload)
        except WireError:
            raise RequestError(400, "The entry is not a valid job message.", code="invalid_message") from None
        traceparent = read_traceparent(job.traceparent)
        also_about(trace=trace_id(traceparent))
        with below(traceparent):
            await self._answer_job(job, entry, answer)

    async def _answer_job(self, job: IngressJob, entry: IngressEntry, answer: _Answer) -> None:
        request = await self._read(job)
        # Whichever gateway has the entry finds the same jobs: the next one hears what this one heard.
        request_id = job_id_of("ingress", entry.producer, entry.entry_id)
        ticket = await self._hall.admit(request, entry.producer, request_id)
        choices = {index: _Choice(index) for index in range(request.num_choices)}
        async with self._hall.open(ticket, is_shared=True) as run:
            async for piece in run:
                choice = choices[piece.index]
                choice.text += piece.text
                choice.finish_reason = piece.finish_reason
                if request.stream and piece.finish_reason is None:
                    await answer.tell(piece.index, choice.take())
        await answer.finish(list(choices.values()), run.outcome)

    async def _read(self, job: IngressJob) -> Request:
        if job.endpoint not in ENDPOINTS:
            raise refusal("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        request = await self._hall.read(job.endpoint, job.body)
        for name in ("resumable", "background"):
            if getattr(request, name):
                raise refusal(name, "is for HTTP; a reply stream waits for whoever reads it")
        if request.tools is not None:
            raise refusal("tools", "are not carried by the queue's replies")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(request.sampling, name) is not None:
                raise refusal(name, "are not carried by the queue's replies")
        return request

    async def _persistently(self, attempt: Callable[[], Awaitable[None]]) -> None:
        await _persist(attempt, self._hall.settings.request_timeout)


@dataclass
class _Choice:
    """What is yet to be told of one choice."""

    index: int
    text: str = ""
    finish_reason: str | None = None

    def take(self) -> str:
        text, self.text = self.text, ""
        return text


class _Answer:
    """The replies to one job, numbered from 1."""

    def __init__(self, hall: Hall, producer: str, reply_id: str) -> None:
        self._hall = hall
        self._producer = producer
        self._id = reply_id
        self._told_chars: dict[int, int] = {}  # by choice, what another gateway has told and is not to be told again
        self._ended: set[int] = set()  # choices whose end it has told
        self.num_told = 0

    async def tell(self, index: int, text: str) -> None:
        """Some more text of a choice. Raises BrokerUnavailable where the queue stays away."""
        text = self._untold(index, text)
        for start in range(0, len(text), MAX_REPLY_CHARS):
            part = text[start : start + MAX_REPLY_CHARS]
            await self._send(Reply(id=self._id, number=self.num_told + 1, index=index, text=part))

    async def finish(self, choices: Sequence[_Choice], outcome: Outcome) -> None:
        """The last text of each choice and how it ended; what it cost, with the last."""
        usage = Usage(
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
            cached_tokens=outcome.cached_tokens,
        )
        for choice in choices:
            if choice.index in self._ended:
                continue
            text = self._untold(choice.index, choice.take())
            cut = len(text) - len(text) % MAX_REPLY_CHARS if len(text) > MAX_REPLY_CHARS else 0
            await self.tell(choice.index, text[:cut])
            is_last = choice is choices[-1]
            await self._send(
                Reply(
                    id=self._id,
                    number=self.num_told + 1,
                    index=choice.index,
                    text=text[cut:],
                    finish_reason=choice.finish_reason,
                    usage=usage if is_last else None,
                    done=is_last,
                )
            )

    async def has_ended(self) -> bool:
        """Whether a gateway that is gone has told all. What it has told of it is not told again: the same events give
        the same text, wherever they are read."""
        for payload in await self._hall.broker.read_replies(self._producer, self._id):
            reply = decode(Reply, payload)
            self.num_told = reply.number
            self._told_chars[reply.index] = self._told_chars.get(reply.index, 0) + len(reply.text)
            if reply.finish_reason is not None:
                self._ended.add(reply.index)
            if reply.done:
                return True
        return False

    def _untold(self, index: int, text: str) -> str:
        told = min(len(text), self._told_chars.get(index, 0))
        if told:
            self._told_chars[index] -= told
        return text[told:]

    async def fail(self, error: RequestError) -> None:
        await self._send(Reply(id=self._id, number=self.num_told + 1, error=error_object(error), done=True))

    async def _send(self, reply: Reply) -> None:
        payload = encode(reply)
        broker = self._hall.broker
        await _persist(lambda: broker.reply(self._producer, self._id, payload), self._hall.settings.request_timeout)
        self.num_told += 1


class _Named(msgspec.Struct):
    id: str


def _reply_id(entry: IngressEntry) -> str:
    """Where the replies go: the producer's own name for the job, or the entry's id where a broken message has none."""
    try:
        if len(entry.payload) <= LIMITS[IngressJob].max_bytes:
            name = msgspec.msgpack.decode(entry.payload, type=_Named).id
            if INGRESS_ID.fullmatch(name):
                return name
    except (ValueError, RecursionError):
        return entry.entry_id
    return entry.entry_id


async def _persist(attempt: Callable[[], Awaitable[None]], give_up_after_s: float) -> None:
    """`attempt` until the queue takes it. Raises BrokerUnavailable when the time is up."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + give_up_after_s
    while True:
        try:
            return await attempt()
        except BrokerUnavailable:
            if loop.time() + RETRY_S > give_up_at_s:
                raise
            await asyncio.sleep(RETRY_S)
