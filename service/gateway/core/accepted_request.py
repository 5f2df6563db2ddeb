"""What a gateway needs to tell the answer of an admitted request: made at its admission, or again from its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from service.gateway.core.job_ids import job_names
from service.gateway.generation.request import GenerationRequest, Source
from service.gateway.openai.validator import read_request
from service.queue.codec import pack_ids, unpack_ids
from service.queue.messages import Job, RequestRecord


@dataclass(frozen=True, kw_only=True)
class AcceptedRequest:
    """An admitted request. Its jobs are one a prompt."""

    request: GenerationRequest
    request_id: str  # also the id of its first job
    tenant: str
    created_s: float  # queue time, Unix seconds
    timeout_s: float  # what is left of its time
    num_prompt_tokens: tuple[int, ...]  # by job
    prompt_texts: tuple[str, ...]  # by prompt, where the request wants them told again; else none
    first_ids: tuple[int, ...] = ()  # of the prompts, where the log-probabilities of the others are told
    jobs: tuple[Job, ...] = ()  # to be submitted; none where that was done before
    record: RequestRecord | None = None  # to be kept with the first job; None where it is kept already, or not at all
    idempotency: str | None = None  # hash of the client's key for it
    came_before: bool = False  # under its key: its client may have events of it

    def with_timeout(self, timeout_s: float) -> AcceptedRequest:
        return replace(self, timeout_s=timeout_s)

    @property
    def job_ids(self) -> Sequence[str]:
        return job_names(self.request_id, len(self.num_prompt_tokens))


def record_of(accepted: AcceptedRequest) -> RequestRecord:
    source = accepted.request.source
    return RequestRecord(
        request_id=accepted.request_id,
        tenant=accepted.tenant,
        endpoint=accepted.request.endpoint,
        outline=source.outline,
        digest=source.digest,
        created_s=accepted.created_s,
        deadline_s=accepted.created_s + accepted.timeout_s,
        num_prompt_tokens=pack_ids(accepted.num_prompt_tokens),
        prompt_texts=accepted.prompt_texts,
        first_ids=pack_ids(accepted.first_ids),
        stays=accepted.request.stays,
    )


def accepted_from(record: RequestRecord, now_s: float) -> AcceptedRequest:
    """The request again, with the shortest possible prompts. `now_s`: queue time."""
    request = read_request(record.endpoint, msgspec.json.decode(record.outline))
    return AcceptedRequest(
        request=replace(
            request,
            source=Source(record.outline, record.digest),
            resumable=record.stays and not request.background,
        ),
        request_id=record.request_id,
        tenant=record.tenant,
        created_s=record.created_s,
        timeout_s=record.deadline_s - now_s,
        num_prompt_tokens=tuple(unpack_ids(record.num_prompt_tokens)),
        prompt_texts=record.prompt_texts,
        first_ids=tuple(unpack_ids(record.first_ids)),
    )
