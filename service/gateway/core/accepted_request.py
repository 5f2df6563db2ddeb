"""An admitted request, built at admission or rebuilt from its record."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate

from model.text.reasoning import ReasoningState
from service.gateway.core.request import GenerationRequest, OutlineReader, Source
from service.queue.codec import pack_ids, unpack_ids
from service.queue.messages import Job, RequestRecord

_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True, kw_only=True)
class AcceptedRequest:
    """An admitted request, with one job per prompt."""

    request: GenerationRequest
    request_id: str  # also the first job's id
    tenant: str
    created_s: float  # queue time, Unix seconds
    timeout_s: float  # time left
    num_prompt_tokens: tuple[int, ...]  # by job
    prompt_texts: tuple[str, ...]  # by prompt, if the response echoes them; else empty
    first_ids: tuple[int, ...] = ()  # by prompt, if the response has prompt log-probabilities
    prompt_ids: tuple[tuple[int, ...], ...] = ()  # by prompt, if the response has them
    reasoning: ReasoningState = ReasoningState.OFF
    jobs: tuple[Job, ...] = ()  # to submit; empty once submitted
    record: RequestRecord | None = None  # to write with the first job
    client_id: str | None = None  # the client's id for the request, unique within the tenant
    idempotency: str | None = None  # digest of the client's key or id
    is_repeat: bool = False  # repeats an idempotency key: the client may have its events already

    def with_timeout(self, timeout_s: float) -> AcceptedRequest:
        return replace(self, timeout_s=timeout_s)

    @property
    def public_id(self) -> str:
        """Id in responses: the client's, if it sent one."""
        return self.client_id or self.request_id

    @property
    def job_ids(self) -> Sequence[str]:
        others = range(1, len(self.num_prompt_tokens))
        return [self.request_id, *(f"{self.request_id}.{number}" for number in others)]


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
        prompt_ids=pack_ids([token for prompt in accepted.prompt_ids for token in prompt]),
        stays=accepted.request.outlives_client,
        reasoning=accepted.reasoning.value,
        client_id=accepted.client_id,
    )


def accepted_from(record: RequestRecord, now_s: float, read_outline: OutlineReader) -> AcceptedRequest:
    """Rebuild the request, with placeholder prompts of minimum length. `now_s`: queue time."""
    request = read_outline(record.endpoint, record.outline)
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
        prompt_ids=_split(unpack_ids(record.prompt_ids), unpack_ids(record.num_prompt_tokens)),
        reasoning=ReasoningState(record.reasoning),
        client_id=record.client_id,
    )


def _split(ids: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = list(accumulate(lengths)) if ids else []
    return tuple(tuple(ids[end - length : end]) for end, length in zip(ends, lengths, strict=False))


def is_client_id(name: str) -> bool:
    """Return whether `name`, which appears in headers and logs, has 1 to 128 visible ASCII characters."""
    return _CLIENT_ID.fullmatch(name) is not None


def new_request_id() -> str:
    """Return 128 random bits in Crockford's base 32, so that ids cannot be guessed."""
    return _in_base_32(secrets.randbits(128))


def request_id_of(*names: str) -> str:
    """Return the id that `names` determine."""
    return _in_base_32(int.from_bytes(sha256("\0".join(names).encode()).digest()[:16]))


def seed_of(request_id: str) -> int:
    """Return the default seed, which is the same in every gateway."""
    return int.from_bytes(sha256(b"seed" + request_id.encode()).digest()[:8])


def _in_base_32(bits: int) -> str:
    return "".join(CROCKFORD[(bits >> shift) & 31] for shift in range(125, -1, -5))
