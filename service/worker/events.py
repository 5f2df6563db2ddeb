from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from service.engine.output_processor import BranchOutput, RequestOutput
from service.errors import EndReason
from service.queue.codec import pack_floats, pack_ids
from service.queue.messages import Event, Part, TokenLogprobs, Usage

MAX_EVENT_TOKENS = 4096
"""Two thirds of the largest event, with 20 alternatives per token."""


def event_of(job_id: str, number: int, outputs: Sequence[RequestOutput]) -> Event:
    has_usage = number == 1 or outputs[-1].end is not None
    if len(outputs) == 1 and len(outputs[0].parts) == 1 and not has_usage:  # nearly always
        return Event(job_id=job_id, number=number, parts=(_part(outputs[0].parts),))
    by_branch: dict[tuple[bool, int], list[BranchOutput]] = {}
    for output in outputs:
        for part in output.parts:
            by_branch.setdefault((not part.is_prompt, part.branch), []).append(part)
    last = outputs[-1]
    usage = Usage(
        prompt_tokens=last.num_prompt_tokens,
        completion_tokens=last.num_output_tokens,
        cached_tokens=last.num_cached_tokens,
        accepted_prediction_tokens=last.num_accepted_drafts if last.num_drafts else UNSET,
        rejected_prediction_tokens=last.num_drafts - last.num_accepted_drafts if last.num_drafts else UNSET,
    )
    return Event(
        job_id=job_id,
        number=number,
        parts=tuple(map(_part, by_branch.values())),
        end=last.end,
        usage=usage if has_usage else None,
        choices=last.choices,
        embedding=last.embedding or None,
    )


def refusal(job_id: str, number: int, reason: EndReason) -> Event:
    return Event(job_id=job_id, number=number, end=reason, usage=Usage(prompt_tokens=0, completion_tokens=0))


def without_end(event: Event) -> Event:
    """Return the event of a job that continues elsewhere."""
    usage = event.usage if event.number == 1 else None
    return replace(event, end=None, usage=usage, choices=(), embedding=None)


def split_by_event(outputs: list[RequestOutput]) -> list[list[RequestOutput]]:
    """Split outputs into events of at most MAX_EVENT_TOKENS; a larger single output is kept whole."""
    if len(outputs) == 1:
        return [outputs]
    runs: list[list[RequestOutput]] = [[]]
    num_tokens = 0
    for output in outputs:
        here = sum(len(part.token_ids) for part in output.parts)
        if num_tokens and num_tokens + here > MAX_EVENT_TOKENS:
            runs.append([])
            num_tokens = 0
        runs[-1].append(output)
        num_tokens += here
    return runs


def _part(outputs: Sequence[BranchOutput]) -> Part:
    if len(outputs) == 1 and not outputs[0].logprobs:
        (only,) = outputs
        return Part(branch=only.branch, is_prompt=only.is_prompt or None, tokens=pack_ids(only.token_ids), end=only.end)
    logprobs = [logprob for part in outputs for logprob in part.logprobs]
    return Part(
        branch=outputs[0].branch,
        is_prompt=outputs[0].is_prompt or None,
        tokens=pack_ids([token for part in outputs for token in part.token_ids]),
        logprobs=TokenLogprobs(
            chosen=pack_floats([logprob.logprob for logprob in logprobs]),
            top_ids=pack_ids([token for logprob in logprobs for token in logprob.top_ids]),
            top=pack_floats([value for logprob in logprobs for value in logprob.top_logprobs]),
        )
        if logprobs
        else None,
        end=outputs[-1].end,
    )
