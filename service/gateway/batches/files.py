"""`/v1/files`: batch input and output, stored in Redis for all gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from aiohttp import BodyPartReader, web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.batches.file_writer import FileWriter
from service.gateway.core.refusals import missing, refusal, storage_refusal, unavailable
from service.gateway.http.middleware import BODY_RESERVATION, READ_TIMEOUT_S, TENANT, json_response
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_bodies import unknown_field
from service.gateway.routes.generation import refuse_idempotency_key
from service.gateway.routes.pages import MAX_PAGE, is_ascending, page_json
from service.observability.logs import fields
from service.queue import keys
from service.queue.interface import BatchStore, GatewayQueue, QueueUnavailable
from service.queue.records import StorageFull, StorageLimits, StoredFile

log = logging.getLogger("quire.gateway")

INPUT, OUTPUT = "batch", "batch_output"
MAX_FILES = 1000
"""Maximum per tenant."""
MAX_FORM_BYTES = 64 << 10
"""Maximum size of a form without its file."""
WINDOW_BYTES = 1 << 20
"""Memory reserved for an upload or download: a few pieces, whatever the file's size."""
CHUNK_BYTES = 64 << 10
SLOWEST_UPLOAD_BYTES_PER_S = 1 << 20
MAX_NAME_CHARS = 255
MAX_PURPOSE_BYTES = 64


class Files:
    def __init__(self, queue: GatewayQueue, limits: StorageLimits, settings: Settings) -> None:
        self._queue = queue
        self._limits = limits
        self._max_file_bytes = settings.max_file_bytes
        self._write_timeout_s = settings.write_timeout

    async def upload(self, http: web.Request) -> web.Response:
        refuse_idempotency_key(http)
        if http.content_type != "multipart/form-data":
            raise RequestError(415, "The body must be of type multipart/form-data.", code="unsupported_media_type")
        if (http.content_length or 0) > self._max_file_bytes + MAX_FORM_BYTES:
            raise self._too_large()
        writer = FileWriter(self._queue, http[TENANT], self._limits)
        try:
            stored = await self._store(http, writer)
        except BaseException as error:
            await asyncio.shield(_drop(writer))
            if isinstance(error, QueueUnavailable):
                raise unavailable() from None
            if isinstance(error, StorageFull):
                raise storage_refusal(error) from None
            raise
        return json_response(file_json(stored))

    async def _store(self, http: web.Request, writer: FileWriter) -> StoredFile:
        """Store an upload. Raises RequestError, StorageFull, QueueUnavailable."""
        await http[BODY_RESERVATION].grow(WINDOW_BYTES)
        if len(await self._queue.batches.list_files(http[TENANT])) >= MAX_FILES:
            raise RequestError(400, f"You have {MAX_FILES} files, the maximum; delete some.", code="too_many_files")
        await writer.reserve(min(http.content_length or 0, self._max_file_bytes))
        try:
            async with asyncio.timeout(http.app[READ_TIMEOUT_S]) as patience:
                form = await self._form(http, writer, patience)
        except TimeoutError:
            raise RequestError(408, "The body did not arrive in time.", code="request_timeout") from None
        except (RequestError, StorageFull, QueueUnavailable, ConnectionError, web.HTTPException):
            raise
        except Exception as error:  # an unknown charset, for example, is a LookupError from aiohttp's form parser
            log.debug("a form could not be read: %r", error)
            raise RequestError(400, "The body is not a valid form.", code="invalid_body") from None
        if form.get("purpose") != INPUT:
            raise refusal("purpose", f"must be '{INPUT}'")
        if "file" not in form:
            raise missing("file")
        return await writer.finish(form["file"][:MAX_NAME_CHARS], INPUT)

    async def _form(self, http: web.Request, writer: FileWriter, patience: asyncio.Timeout) -> dict[str, str]:
        """Return the fields `purpose` and `file` (its name); write the content to `writer`.

        Raises RequestError (400, 413), the writer's errors, and any exception for a malformed form.
        """
        form: dict[str, str] = {}
        reader = await http.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None or part.name in form:
                raise RequestError(400, "The form has the fields 'file' and 'purpose', each once.", code="invalid_body")
            if part.name == "purpose":
                form[part.name] = await _purpose(part)
            elif part.name == "file":
                name = (part.filename or "file").encode("utf-8", "surrogateescape")
                form[part.name] = name.decode("utf-8", "replace")
                await self._copy(part, writer, patience)
            else:
                raise unknown_field(part.name)
        return form

    async def _copy(self, part: BodyPartReader, writer: FileWriter, patience: asyncio.Timeout) -> None:
        loop, num_bytes = asyncio.get_running_loop(), 0
        while chunk := await part.read_chunk(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._max_file_bytes:
                raise self._too_large()
            began_at_s = loop.time()
            await writer.write(chunk)
            # Do not count a long file or a slow queue as the client's delay.
            extra_s = loop.time() - began_at_s + len(chunk) / SLOWEST_UPLOAD_BYTES_PER_S
            patience.reschedule((patience.when() or loop.time()) + extra_s)

    def _too_large(self) -> RequestError:
        return RequestError(413, f"A file may have at most {self._max_file_bytes} bytes.", code="body_too_large")

    async def list(self, http: web.Request) -> web.Response:
        try:
            files = await self._queue.batches.list_files(http[TENANT])
        except QueueUnavailable:
            raise unavailable() from None
        purpose = http.query.get("purpose")
        wanted = [file for file in files if purpose in (None, file.purpose)]
        if is_ascending(http):
            wanted.reverse()
        return json_response(page_json(http, [file_json(file) for file in wanted], MAX_PAGE))

    async def get(self, http: web.Request) -> web.Response:
        return json_response(file_json(await self._found(http)))

    async def content(self, http: web.Request) -> web.StreamResponse:
        file = await self._found(http)
        await http[BODY_RESERVATION].grow(WINDOW_BYTES)
        response = web.StreamResponse()
        response.content_type, response.content_length = "application/octet-stream", file.num_bytes
        if http.method == "HEAD":
            return response
        try:
            pieces = await self._queue.batches.file_pieces(file.file_id, 0, 1)
            async with asyncio.timeout(self._write_timeout_s):
                await response.prepare(http)
            await self._send(response, file, pieces)
        except QueueUnavailable:
            if not response.prepared:
                raise unavailable() from None
            _cut_off(http)
        except (TimeoutError, ConnectionError):
            _cut_off(http)
        return response

    async def _send(self, response: web.StreamResponse, file: StoredFile, pieces: Sequence[bytes]) -> None:
        """Send the file. Raises QueueUnavailable (also if the file was deleted), TimeoutError, ConnectionError."""
        num_pieces = num_bytes = 0
        while pieces:
            for piece in pieces:
                async with asyncio.timeout(self._write_timeout_s):
                    await response.write(piece)
                num_bytes += len(piece)
            num_pieces += len(pieces)
            pieces = await self._queue.batches.file_pieces(file.file_id, num_pieces, 1)
        if num_bytes != file.num_bytes:
            raise QueueUnavailable("the file is not there any more")

    async def delete(self, http: web.Request) -> web.Response:
        file = await self._found(http)
        try:
            await self._queue.batches.drop_file(file.file_id, file.tenant)
        except QueueUnavailable:
            raise unavailable() from None
        return json_response({"id": file.file_id, "object": "file", "deleted": True})

    async def _found(self, http: web.Request) -> StoredFile:
        return await find_file(self._queue.batches, http.match_info["file_id"], http[TENANT])


async def find_file(store: BatchStore, file_id: str, tenant: str, param: str = "file_id") -> StoredFile:
    """Return a tenant's file. Raises RequestError: 404 if it is missing or another tenant's, 503."""
    try:
        file = await store.get_file(file_id)
    except QueueUnavailable:
        raise unavailable() from None
    except ValueError:
        file = None
    if file is None or file.tenant != tenant:
        raise RequestError(404, "There is no such file.", param=param, code="file_not_found")
    return file


def file_json(file: StoredFile) -> Json:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "expires_at": int(file.created_s) + keys.FILE_TTL_S,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def _purpose(part: BodyPartReader) -> str:
    data = bytearray()
    while chunk := await part.read_chunk():
        data += chunk
        if len(data) > MAX_PURPOSE_BYTES:
            raise refusal("purpose", f"must be '{INPUT}'")
    return data.decode("utf-8", "replace")


async def _drop(writer: FileWriter) -> None:
    try:
        await writer.drop()
    except QueueUnavailable:
        log.warning("the queue keeps a broken upload for a while %s", fields(file=writer.file_id))


def _cut_off(http: web.Request) -> None:
    """Abort the connection: nothing else reports that a response is incomplete."""
    if http.transport is not None:
        http.transport.abort()
