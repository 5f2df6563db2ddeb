"""Jobs between their claim and their last event, and cancels that arrived before the claim."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.engine.output_processor import RequestOutput
from service.errors import EndReason
from service.queue.messages import Cancel, Event
from service.worker.events import event_of, split_by_event, without_end
from service.worker.spans import JobSpans

MAX_EARLY_CANCELS = 8192


@dataclass
class OpenJob:
    """A job between its claim and its last event."""

    request_id: str  # of this claim: outputs of an earlier claim have another
    next_number: int
    deadline: asyncio.TimerHandle | None
    spans: JobSpans | None  # None: not traced
    cleared_at_number: int | None = None  # event after which a suspect is cleared
    is_leaving: bool = False  # goes on elsewhere once the engine has ended it

    def events(self, job_id: str, outputs: list[RequestOutput]) -> tuple[list[Event], bool]:
        """Return the events of these outputs, and whether the job goes on elsewhere now."""
        events, is_released = [], False
        for own in split_by_event(outputs):
            event = event_of(job_id, self.next_number, own)
            if self.is_leaving and event.end is EndReason.SHUTDOWN:
                is_released = True
                event = without_end(event)
            if event.parts or event.end is not None:
                events.append(event)
                self.next_number += 1
        return events, is_released


def outputs_by_job(outputs: Iterable[RequestOutput], jobs: Mapping[str, OpenJob]) -> dict[str, list[RequestOutput]]:
    """Return the outputs of each open job, in order. Outputs of other jobs and of earlier claims are dropped."""
    by_job: dict[str, list[RequestOutput]] = {}
    for output in outputs:
        job_id = output.request_id.rpartition("/")[0]
        job = jobs.get(job_id)
        if job is not None and job.request_id == output.request_id:
            by_job.setdefault(job_id, []).append(output)
    return by_job


class EarlyCancels:
    """The last MAX_EARLY_CANCELS jobs that were cancelled while not open here."""

    def __init__(self) -> None:
        self._by_job: OrderedDict[str, list[Cancel]] = OrderedDict()

    def add(self, cancel: Cancel) -> None:
        self._by_job.setdefault(cancel.job_id, []).append(cancel)
        if len(self._by_job) > MAX_EARLY_CANCELS:
            self._by_job.popitem(last=False)

    def pop(self, job_id: str) -> Sequence[Cancel]:
        """Remove and return the cancels of a job that is open now."""
        return self._by_job.pop(job_id, ())
