from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.engine.output_processor import RequestOutput
from service.errors import EndReason
from service.queue.messages import Cancel, Event
from service.worker.events import event_of, split_by_event, without_end
from service.worker.job_counts import ClaimTimes
from service.worker.spans import JobSpans

MAX_EARLY_CANCELS = 8192


@dataclass
class OpenJob:
    request_id: str  # of this claim
    next_number: int
    deadline: asyncio.TimerHandle | None
    times: ClaimTimes
    spans: JobSpans | None  # None: not traced
    cleared_at_number: int | None = None  # event that clears a suspect
    is_leaving: bool = False  # for another worker

    def events(self, job_id: str, outputs: list[RequestOutput]) -> tuple[list[Event], bool]:
        """Return the events, and whether the job leaves now."""
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
    """Return outputs by open job, dropping outputs of earlier claims."""
    by_job: dict[str, list[RequestOutput]] = {}
    for output in outputs:
        job_id = output.request_id.rpartition("/")[0]
        job = jobs.get(job_id)
        if job is not None and job.request_id == output.request_id:
            by_job.setdefault(job_id, []).append(output)
    return by_job


class EarlyCancels:
    """Cancels of the last MAX_EARLY_CANCELS jobs not open here."""

    def __init__(self) -> None:
        self._by_job: OrderedDict[str, list[Cancel]] = OrderedDict()

    def add(self, cancel: Cancel) -> None:
        self._by_job.setdefault(cancel.job_id, []).append(cancel)
        if len(self._by_job) > MAX_EARLY_CANCELS:
            self._by_job.popitem(last=False)

    def pop(self, job_id: str) -> Sequence[Cancel]:
        return self._by_job.pop(job_id, ())
