"""Follows the events of open requests, turns them into text, and sees to it that no job outlives its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from service.errors import ENDINGS, EndReason, RequestError
from service.gateway.admission import Ticket, unavailable
from service.gateway.fleet import Fleet
from service.gateway.request import Request
from service.gateway.served_model import ServedModel
from service.gateway.text_stream import TextStream, without_end_token
from service.logs import fields
from service.metrics import GatewayMetrics, RequestTimes
from service.wire.broker import BrokerUnavailable, DoorBroker
from service.wire.codec import unpack_floats, unpack_ids
from service.wire.messages import Cancel, Event, Part

log = logging.getLogger("quire.gateway")

CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class TokenLogprob:
    """One token of the answer, and the likeliest in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """A part of an answer. Text may lag behind the tokens whose log-probabilities stand here."""

    number: int  # of the event that brought it
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How an answer ended well."""

    finish_reason: str  # OpenAI's word
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None where the end was seen here before the worker told it


class EventStream(Protocol):
    """What the brokers' `follow` gives: an iterator that can be let go of before its end."""

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None: ...


class Run:
    """One open request: iterate it to its end, then look at `outcome`."""

    def __init__(self, ticket: Ticket, events: EventStream, model: ServedModel, times: RequestTimes) -> None:
        request = ticket.request
        self._ticket = ticket
        self._events = events
        self._times = times
        # A reply is a text of its own; a completion goes on where its prompt stopped, leading space and all.
        detokenizer = model.tokenizer.detokenizer(request.skip_special_tokens, at_start=request.is_chat)
        self._text = TextStream(detokenizer, request.stop, request.include_stop_str_in_output)
        self._silent_ids = _silent_ids(request, model)
        self._num_tokens = 0
        self.ended_by_worker = False
        self.reason: EndReason | None = None
        self.outcome: Outcome | None = None

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Piece:
        """The next part of the answer that has anything to tell. Raises RequestError where the job failed,
        BrokerUnavailable where its events cannot be read."""
        while self.reason is None:
            try:
                event = await anext(self._events)
            except StopAsyncIteration:
                raise BrokerUnavailable("the events stopped before the end") from None
            piece = self._take(event)
            if piece.text or piece.logprobs:
                return piece
        raise StopAsyncIteration

    def _take(self, event: Event) -> Piece:
        self.ended_by_worker = event.end is not None
        piece, stopped = self._piece(event)
        if stopped:
            self._close(EndReason.STOP, None)
        elif event.end is not None:
            self._close(event.end, event)
        return piece

    def _piece(self, event: Event) -> tuple[Piece, bool]:
        parts = event.parts
        ids = [token for part in parts for token in unpack_ids(part.tokens)]
        self._times.tokens(len(ids))
        told = self._text.push(without_end_token(ids, self._silent_ids))
        text, stopped = told.text, told.stopped
        num_tokens = told.num_tokens if stopped else len(ids)
        if event.end is not None and not stopped:
            last = self._text.end()
            text, stopped = text + last.text, last.stopped
        self._num_tokens += num_tokens
        return Piece(event.number, text, _logprobs(parts[0], ids[:num_tokens]) if parts else ()), stopped

    def _close(self, reason: EndReason, event: Event | None) -> None:
        self.reason = reason
        ending = ENDINGS[reason]
        if ending.finish_reason is None:
            raise failure(reason)
        usage = event.usage if event is not None else None
        self.outcome = Outcome(
            finish_reason=ending.finish_reason,
            prompt_tokens=self._ticket.num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=usage.cached_tokens if usage is not None else None,
        )


class Relay:
    def __init__(self, model: ServedModel, broker: DoorBroker, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self._model = model
        self._broker = broker
        self._fleet = fleet
        self._metrics = metrics
        self._open: dict[str, _Scope] = {}
        self._cancels: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[Run]:
        """Submits the job; on leaving before its end, for whatever reason, cancels it.

        Raises RequestError: 503 where the job could not be submitted or this door closes, 504 past its deadline.
        """
        job_id = ticket.job.job_id
        events = self._broker.follow(job_id)
        times = self._metrics.started(ticket.num_prompt_tokens)
        run = Run(ticket, events, self._model, times)
        scope = _Scope(asyncio.timeout(ticket.timeout_s))
        self._open[job_id] = scope
        try:
            async with scope.timeout:
                await self._broker.submit(ticket.job)
                self._fleet.note_submitted()
                yield run
        except BrokerUnavailable:
            run.reason = EndReason.INTERNAL
            raise unavailable() from None
        except TimeoutError:
            if not scope.timeout.expired():
                raise
            run.reason = scope.reason
            raise failure(scope.reason) from None
        finally:
            del self._open[job_id]
            self._leave(run, job_id, events)
            times.ended(run.reason or EndReason.CANCELLED)

    def end_all(self) -> None:
        """Every open request ends now, with SHUTDOWN."""
        for scope in self._open.values():
            scope.reason = EndReason.SHUTDOWN
            scope.timeout.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Waits until the cancels on their way have been said, a while at most."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CLOSE_TIMEOUT_S)

    def _leave(self, run: Run, job_id: str, events: EventStream) -> None:
        # Said by a task of its own: the request's task may itself be cancelled, its client having left.
        if not run.ended_by_worker:
            reason = run.reason if run.reason in (EndReason.STOP, EndReason.DEADLINE) else EndReason.CANCELLED
            self._spawn(self._say_cancel(Cancel(job_id=job_id, reason=reason)))
        self._spawn(events.aclose())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _say_cancel(self, cancel: Cancel) -> None:
        try:
            await self._broker.cancel(cancel)
        except BrokerUnavailable:
            # The job's deadline ends it when the queue is back.
            log.warning("cancel not said %s", fields(job=cancel.job_id, reason=cancel.reason))


@dataclass
class _Scope:
    """What bounds an open request in time, and what it means when the time is up."""

    timeout: asyncio.Timeout
    reason: EndReason = EndReason.DEADLINE


def failure(reason: EndReason) -> RequestError:
    """What the client of a job hears that did not end well."""
    ending = ENDINGS[reason]
    kind = "invalid_request_error" if ending.status < 499 else "server_error"
    return RequestError(ending.status, ending.message, kind, code=reason.value)


def _silent_ids(request: Request, model: ServedModel) -> frozenset[int]:
    """Tokens that end the answer and are no part of its text."""
    if request.include_stop_str_in_output:
        return frozenset()
    eos = () if request.sampling.ignore_eos else model.eos_token_ids
    return frozenset((*request.sampling.stop_token_ids, *eos))


def _logprobs(part: Part, ids: list[int]) -> tuple[TokenLogprob, ...]:
    if part.logprobs is None:
        return ()
    chosen = unpack_floats(part.logprobs.chosen)
    top = list(zip(unpack_ids(part.logprobs.top_ids), unpack_floats(part.logprobs.top), strict=True))
    width = len(top) // len(chosen) if chosen else 0
    return tuple(
        TokenLogprob(token, logprob, tuple(top[i * width : (i + 1) * width]))
        for i, (token, logprob) in enumerate(zip(ids, chosen, strict=False))
    )
