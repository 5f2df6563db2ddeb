from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from service.errors import ENDINGS
from service.observability.logs import fields
from service.observability.tracing import Tracing, trace_id
from service.queue.interface import Claim
from service.queue.messages import Event, Job
from service.worker.job_counts import ClaimTimes

log = logging.getLogger("quire.job_loop")


@dataclass(kw_only=True)
class JobSpans:
    """Spans of one claim, emitted at its end."""

    tracing: Tracing
    job: Job
    times: ClaimTimes

    def end(self, last: Event | None) -> None:
        now_s = time.time()
        times, request = self.times, self.times.request
        started_s = request.started_s or now_s
        first_token_s = request.first_token_s
        if times.attempt == 1:
            self._span("queue", times.claimed_s - times.queued_s, started_s, {"quire.claimed_after_s": times.queued_s})
        if request.started_s:
            self._span("prefill", started_s, first_token_s or now_s, self._of_prompt(last))
        if first_token_s:
            self._span("decode", first_token_s, now_s, self._of_answer(last), self._failure(last))

    def _span(
        self, name: str, start_s: float, end_s: float, attributes: dict[str, object], failure: str | None = None
    ) -> None:
        known = {"quire.job": self.job.job_id, "quire.tenant": self.job.tenant, "quire.attempt": self.times.attempt}
        span = self.tracing.start_span(name, self.job.traceparent, {**known, **attributes}, at_s=start_s)
        span.end(failure, max(start_s, end_s))

    def _of_prompt(self, last: Event | None) -> dict[str, object]:
        usage = None if last is None else last.usage
        return {
            "gen_ai.usage.input_tokens": len(self.job.prompt) // 4,
            "gen_ai.usage.cache_read.input_tokens": None if usage is None else usage.cached_tokens,
        }

    def _of_answer(self, last: Event | None) -> dict[str, object]:
        if last is None or last.end is None:
            return {"quire.end": "handed_on"}
        return {
            "quire.end": last.end.value,
            "gen_ai.usage.output_tokens": None if last.usage is None else last.usage.completion_tokens,
        }

    @staticmethod
    def _failure(last: Event | None) -> str | None:
        end = None if last is None else last.end
        return end.value if end is not None and ENDINGS[end].finish_reason is None else None


def spans_of(claim: Claim, times: ClaimTimes, tracing: Tracing) -> JobSpans | None:
    """Return a claim's spans; None if not traced."""
    if not tracing.is_on or claim.job.traceparent is None:
        return None
    return JobSpans(tracing=tracing, job=claim.job, times=times)


def log_claim(claim: Claim) -> None:
    job = claim.job
    trace = {} if job.traceparent is None else {"trace": trace_id(job.traceparent)}
    if claim.attempt > 1:
        log.info(
            "goes on with %s", fields(job=job.job_id, attempt=claim.attempt, num_events=len(claim.history), **trace)
        )
    elif log.isEnabledFor(logging.DEBUG):
        log.debug("claimed %s", fields(job=job.job_id, prompt_tokens=len(job.prompt) // 4, **trace))
