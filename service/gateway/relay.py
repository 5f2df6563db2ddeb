"""Opens requests: submits their jobs, follows them, and sees to it that no job outlives its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from service.errors import EndReason
from service.gateway.admission import Ticket, unavailable
from service.gateway.fleet import Fleet
from service.gateway.job_text import JobText
from service.gateway.run import JobRun, Run, failure
from service.gateway.served_model import ServedModel
from service.logs import fields
from service.metrics import GatewayMetrics
from service.wire.broker import BrokerUnavailable, DoorBroker
from service.wire.messages import Cancel

log = logging.getLogger("quire.gateway")

CLOSE_TIMEOUT_S = 2.0


class Relay:
    def __init__(self, model: ServedModel, broker: DoorBroker, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self._model = model
        self._broker = broker
        self._fleet = fleet
        self._metrics = metrics
        self._open: set[_Scope] = set()
        self._cancels: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[Run]:
        """Submits the jobs; on leaving before their end, for whatever reason, cancels them.

        Raises RequestError: 503 where a job could not be submitted or this door closes, 504 past the deadline.
        """
        jobs = [self._follow(ticket, number) for number in range(len(ticket.jobs))]
        run = Run(jobs, sum(ticket.num_prompt_tokens))
        scope = _Scope(asyncio.timeout(ticket.timeout_s))
        self._open.add(scope)
        reason = None
        try:
            async with scope.timeout:
                for job in ticket.jobs:
                    await self._broker.submit(job)
                    self._fleet.note_submitted()
                yield run
        except BrokerUnavailable:
            reason = EndReason.INTERNAL
            raise unavailable() from None
        except TimeoutError:
            if not scope.timeout.expired():
                raise
            reason = scope.reason
            raise failure(scope.reason) from None
        finally:
            self._open.discard(scope)
            run.leave(reason)
            for job in jobs:
                self._spawn(job.close())

    def _follow(self, ticket: Ticket, number: int) -> JobRun:
        job_id = ticket.jobs[number].job_id
        text = JobText(ticket.request, self._model, number * ticket.request.sampling.n)
        times = self._metrics.started(ticket.num_prompt_tokens[number])
        return JobRun(job_id, self._broker.follow(job_id), text, times, self._cancel)

    def end_all(self) -> None:
        """Every open request ends now, with SHUTDOWN."""
        for scope in self._open:
            scope.reason = EndReason.SHUTDOWN
            scope.timeout.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Waits until the cancels on their way have been said, a while at most."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CLOSE_TIMEOUT_S)

    def _cancel(self, cancel: Cancel) -> None:
        # Said by a task of its own: the request's task may itself be cancelled, its client having left.
        self._spawn(self._say_cancel(cancel))

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


@dataclass(eq=False)
class _Scope:
    """What bounds an open request in time, and what it means when the time is up."""

    timeout: asyncio.Timeout
    reason: EndReason = EndReason.DEADLINE
