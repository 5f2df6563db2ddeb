"""`/v1/batches`: files of requests, run at low priority."""

from __future__ import annotations

import secrets

import msgspec
from aiohttp import web

from service.errors import RequestError
from service.gateway.batches.files import INPUT, find_file
from service.gateway.batches.runner import BatchRunner
from service.gateway.core.queue_writes import write
from service.gateway.core.refusals import STORAGE_RETRY_AFTER_S, refusal, storage_refusal, unavailable
from service.gateway.core.request import BATCH_ENDPOINTS
from service.gateway.http.middleware import TENANT, json_response, read_body
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_bodies import check_metadata, convert
from service.gateway.openai.strict_json import decode_object
from service.gateway.routes.generation import refuse_idempotency_key
from service.gateway.routes.pages import list_json, page_limit
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.records import Batch, BatchStatus, StorageFull, StorageLimits

WINDOWS_S = {"24h": 24 * 3600}
DEFAULT_PAGE, MAX_PAGE = 20, 100
MAX_OPEN_BATCHES = 100
"""Maximum per tenant. Most of them wait; their storage is limited in bytes."""


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class Batches:
    def __init__(self, queue: GatewayQueue, runner: BatchRunner, limits: StorageLimits) -> None:
        self._queue = queue
        self._runner = runner
        self._limits = limits

    async def create(self, http: web.Request) -> web.Response:
        refuse_idempotency_key(http)
        body = convert(decode_object(await read_body(http)), BatchBody)
        _check(body)
        file = await find_file(self._queue.batches, body.input_file_id, http[TENANT], "input_file_id")
        if file.purpose != INPUT:
            raise refusal("input_file_id", f"must be a file of purpose '{INPUT}'")
        try:
            await self._require_room(http[TENANT])
            now_s = await self._queue.now_s()
            batch = Batch(
                batch_id=f"batch_{secrets.token_hex(16)}",
                tenant=http[TENANT],
                endpoint=body.endpoint,
                input_file_id=file.file_id,
                created_s=now_s,
                expires_s=now_s + WINDOWS_S[body.completion_window],
                metadata=body.metadata or {},
            )
            await write(lambda: self._queue.batches.put_batch(batch, self._limits))
        except QueueUnavailable:
            raise unavailable() from None
        except StorageFull as full:
            raise storage_refusal(full) from None
        self._runner.wake()
        return json_response(batch_json(batch))

    async def _require_room(self, tenant: str) -> None:
        num_open = sum(batch.tenant == tenant for batch in await self._queue.batches.open_batches())
        if num_open >= MAX_OPEN_BATCHES:
            message = f"{num_open} of your batches are open already ({MAX_OPEN_BATCHES} are allowed)."
            raise RequestError(
                429, message, "rate_limit_error", code="too_many_open_batches", retry_after_s=STORAGE_RETRY_AFTER_S
            )

    async def list(self, http: web.Request) -> web.Response:
        limit = page_limit(http, DEFAULT_PAGE, MAX_PAGE)
        try:
            batches = await self._queue.batches.list_batches(http[TENANT], http.query.get("after"), limit + 1)
        except QueueUnavailable:
            raise unavailable() from None
        page = [batch_json(batch) for batch in batches[:limit]]
        return json_response(list_json(page, has_more=len(batches) > limit))

    async def get(self, http: web.Request) -> web.Response:
        batch = await self._found(http)
        try:
            is_cancelled = batch.is_open and await self._queue.batches.is_batch_cancelled(batch.batch_id)
        except QueueUnavailable:
            raise unavailable() from None
        # A waiting batch is cancelled only when its turn comes.
        return json_response(batch_json(batch) | ({"status": BatchStatus.CANCELLING} if is_cancelled else {}))

    async def cancel(self, http: web.Request) -> web.Response:
        batch = await self._found(http)
        if not batch.is_open:
            raise RequestError(409, f"The batch is {batch.status} already.", param="batch_id", code="batch_ended")
        try:
            await self._queue.batches.cancel_batch(batch.batch_id)
        except QueueUnavailable:
            raise unavailable() from None
        self._runner.wake()
        return json_response({**batch_json(batch), "status": BatchStatus.CANCELLING})

    async def _found(self, http: web.Request) -> Batch:
        try:
            batch = await self._queue.batches.get_batch(http.match_info["batch_id"])
        except QueueUnavailable:
            raise unavailable() from None
        except ValueError:
            batch = None
        if batch is None or batch.tenant != http[TENANT]:
            raise RequestError(404, "There is no such batch.", param="batch_id", code="batch_not_found")
        return batch


def _check(body: BatchBody) -> None:
    if body.endpoint not in BATCH_ENDPOINTS:
        raise refusal("endpoint", f"must be one of {', '.join(BATCH_ENDPOINTS)}")
    if body.completion_window not in WINDOWS_S:
        raise refusal("completion_window", f"must be one of {', '.join(WINDOWS_S)}")
    check_metadata(body.metadata or {})


def batch_json(batch: Batch) -> Json:
    times = {status.value: batch.at_s.get(status) for status in BatchStatus if status is not BatchStatus.VALIDATING}
    errors = [msgspec.to_builtins(error) | {"param": None} for error in batch.errors]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_s),
        "expires_at": int(batch.expires_s),
        **{f"{name}_at": None if at is None else int(at) for name, at in times.items()},
        "request_counts": {
            "total": batch.num_total,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "metadata": dict(batch.metadata) or None,
    }
