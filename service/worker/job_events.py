"""What the engine says of a request, as the events that the queue carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.engine.engine import BranchOutput, Output
from service.errors import EndReason
from service.wire.codec import pack_floats, pack_ids
from service.wire.messages import Event, Part, TokenLogprobs, Usage


def event_of(job_id: str, number: int, outputs: Sequence[Output]) -> Event:
    """One event of a job's outputs since the last one."""
    by_branch: dict[int, list[BranchOutput]] = {}
    for output in outputs:
        for part in output.parts:
            by_branch.setdefault(part.branch, []).append(part)
    last = outputs[-1]
    usage = Usage(
        prompt_tokens=last.num_prompt_tokens,
        completion_tokens=last.num_output_tokens,
        cached_tokens=last.num_cached_tokens,
    )
    return Event(
        job_id=job_id,
        number=number,
        parts=tuple(_part(branch, news) for branch, news in by_branch.items()),
        end=last.end,
        usage=usage if last.end is not None else None,
        choices=last.choices,
    )


def refusal(job_id: str, number: int, reason: EndReason) -> Event:
    """The end of a job that no engine saw."""
    return Event(job_id=job_id, number=number, end=reason, usage=Usage(prompt_tokens=0, completion_tokens=0))


def without_end(event: Event) -> Event:
    """The same news of a job that goes on elsewhere."""
    return replace(event, end=None, usage=None, choices=())


def _part(branch: int, news: Sequence[BranchOutput]) -> Part:
    logprobs = [logprob for part in news for logprob in part.logprobs]
    return Part(
        branch=branch,
        tokens=pack_ids([token for part in news for token in part.token_ids]),
        logprobs=TokenLogprobs(
            chosen=pack_floats([logprob.logprob for logprob in logprobs]),
            top_ids=pack_ids([token for logprob in logprobs for token in logprob.top_ids]),
            top=pack_floats([value for logprob in logprobs for value in logprob.top_logprobs]),
        )
        if logprobs
        else None,
        end=news[-1].end,
    )
