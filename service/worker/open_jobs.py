"""Jobs between their claim and their last event, and the cancels that came before the claim."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.engine.output_processor import RequestOutput
from service.errors import EndReason
from service.queue.messages import Cancel, Event
from service.worker.events import event_of, in_events, without_end
from service.worker.spans import JobSpans

MAX_HEARD = 8192


@dataclass
class OpenJob:
    """A job between its claim and its last event."""

    request_id: str  # of this claim: what an earlier one of the same job still says is not mistaken for it
    next_number: int
    deadline: asyncio.TimerHandle | None
    spans: JobSpans | None  # None: nobody traces it
    cleared_at_number: int | None = None  # a suspect that has told this event is none any more
    is_leaving: bool = False  # it goes on elsewhere, as soon as the engine has let go of it

    def events(self, job_id: str, outputs: list[RequestOutput]) -> tuple[list[Event], bool]:
        """What to tell of them, and whether the engine has let go of the job for others."""
        events, is_let_go = [], False
        for outputs_of_one in in_events(outputs):
            event = event_of(job_id, self.next_number, outputs_of_one)
            if self.is_leaving and event.end is EndReason.SHUTDOWN:
                is_let_go = True
                event = without_end(event)
            if event.parts or event.end is not None:
                events.append(event)
                self.next_number += 1
        return events, is_let_go


def outputs_by_job(outputs: Iterable[RequestOutput], jobs: Mapping[str, OpenJob]) -> dict[str, list[RequestOutput]]:
    """What the engine says of these jobs, each in its order. What it still says of others, or of an earlier claim of
    one of them, nobody hears."""
    by_job: dict[str, list[RequestOutput]] = {}
    for output in outputs:
        job_id = output.request_id.rpartition("/")[0]
        job = jobs.get(job_id)
        if job is not None and job.request_id == output.request_id:
            by_job.setdefault(job_id, []).append(output)
    return by_job


class EarlyCancels:
    """Of jobs that are not open (yet): the last of them, as many as fit."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, list[Cancel]] = OrderedDict()

    def keep(self, cancel: Cancel) -> None:
        self._heard.setdefault(cancel.job_id, []).append(cancel)
        if len(self._heard) > MAX_HEARD:
            self._heard.popitem(last=False)

    def take(self, job_id: str) -> Sequence[Cancel]:
        """Those of a job that is open now."""
        return self._heard.pop(job_id, ())
