"""`/v1/files`: what batches read and write. The contents lie in the queue's Redis, so that every gateway has them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from aiohttp import BodyPartReader, web

from service.errors import RequestError
from service.gateway.endpoints.completions import refuse_idempotency_key
from service.gateway.endpoints.pages import MAX_PAGE, is_ascending, page_json
from service.gateway.generation.refusals import missing, refusal
from service.gateway.hall.admission import unavailable
from service.gateway.http_server.guard import READ_TIMEOUT_S, TENANT, json_response
from service.gateway.openai.bodies import unknown_field
from service.wire import keys
from service.wire.batches import BatchStore, StoredFile
from service.wire.broker import BrokerUnavailable, DoorBroker

log = logging.getLogger("quire.gateway")

Json = dict[str, Any]

INPUT, OUTPUT = "batch", "batch_output"
MAX_FILES = 1000
"""Of one tenant."""
MAX_NAME_CHARS = 255
MAX_PURPOSE_BYTES = 64


class Files:
    def __init__(self, broker: DoorBroker, max_file_bytes: int) -> None:
        self._broker = broker
        self._max_file_bytes = max_file_bytes

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files", self._list),
            web.get("/v1/files/{file_id}", self._get),
            web.get("/v1/files/{file_id}/content", self._content),
            web.delete("/v1/files/{file_id}", self._delete),
        ]

    async def _upload(self, http: web.Request) -> web.Response:
        refuse_idempotency_key(http)
        if http.content_type != "multipart/form-data":
            raise RequestError(415, "The body must be of type multipart/form-data.", code="unsupported_media_type")
        try:
            async with asyncio.timeout(http.app[READ_TIMEOUT_S]):
                form = await self._form(http)
        except TimeoutError:
            raise RequestError(408, "The body did not arrive in time.", code="request_timeout") from None
        except (RequestError, ConnectionError, web.HTTPException):
            raise
        except Exception as error:  # aiohttp's reader of forms fails in any way: an unknown charset is a LookupError
            log.debug("a form could not be read: %r", error)
            raise RequestError(400, "The body is no well-formed form.", code="invalid_body") from None
        if form.get("purpose") != INPUT.encode():
            raise refusal("purpose", f"must be '{INPUT}'")
        if "file" not in form:
            raise missing("file")
        name = form["filename"].decode("utf-8", "replace")[:MAX_NAME_CHARS]
        try:
            if len(await self._broker.files(http[TENANT])) >= MAX_FILES:
                raise RequestError(400, f"There are {MAX_FILES} files already; delete some.", code="too_many_files")
            stored = await store(self._broker, http[TENANT], name, INPUT, form["file"])
        except BrokerUnavailable:
            raise unavailable() from None
        return json_response(file_json(stored))

    async def _form(self, http: web.Request) -> dict[str, bytes]:
        """The fields `file` and `purpose`, and the name of the file. Raises RequestError (400, 413), and anything for
        what is no form."""
        form: dict[str, bytes] = {}
        reader = await http.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None or part.name in form:
                raise RequestError(400, "The form has the fields 'file' and 'purpose', each once.", code="invalid_body")
            if part.name not in ("file", "purpose"):
                raise unknown_field(part.name)
            data = await _bounded(part, self._max_file_bytes if part.name == "file" else MAX_PURPOSE_BYTES)
            if data is None and part.name == "purpose":
                raise refusal("purpose", f"must be '{INPUT}'")
            if data is None:
                raise RequestError(413, f"A file may have at most {self._max_file_bytes} bytes.", code="body_too_large")
            form[part.name] = data
            if part.name == "file":
                form["filename"] = (part.filename or "file").encode("utf-8", "surrogateescape")
        return form

    async def _list(self, http: web.Request) -> web.Response:
        try:
            files = await self._broker.files(http[TENANT])
        except BrokerUnavailable:
            raise unavailable() from None
        purpose = http.query.get("purpose")
        wanted = [file for file in files if purpose in (None, file.purpose)]
        if is_ascending(http):
            wanted.reverse()
        return json_response(page_json(http, [file_json(file) for file in wanted], MAX_PAGE))

    async def _get(self, http: web.Request) -> web.Response:
        return json_response(file_json(await self._found(http)))

    async def _content(self, http: web.Request) -> web.Response:
        file = await self._found(http)
        try:
            data = await self._broker.file_data(file.file_id)
        except BrokerUnavailable:
            raise unavailable() from None
        return web.Response(body=data, content_type="application/octet-stream")

    async def _delete(self, http: web.Request) -> web.Response:
        file = await self._found(http)
        try:
            await self._broker.drop_file(file)
        except BrokerUnavailable:
            raise unavailable() from None
        return json_response({"id": file.file_id, "object": "file", "deleted": True})

    async def _found(self, http: web.Request) -> StoredFile:
        return await find_file(self._broker, http.match_info["file_id"], http[TENANT])


async def find_file(store: BatchStore, file_id: str, tenant: str, param: str = "file_id") -> StoredFile:
    """Raises RequestError: 404 for one that is not there or another tenant's, 503."""
    try:
        file = await store.file(file_id)
    except BrokerUnavailable:
        raise unavailable() from None
    except ValueError:
        file = None
    if file is None or file.tenant != tenant:
        raise RequestError(404, "There is no such file.", param=param, code="file_not_found")
    return file


async def store(broker: DoorBroker, tenant: str, name: str, purpose: str, data: bytes) -> StoredFile:
    """Keep a new file. Raises BrokerUnavailable."""
    file = StoredFile(
        file_id=f"file-{secrets.token_hex(16)}",
        tenant=tenant,
        filename=name,
        purpose=purpose,
        num_bytes=len(data),
        created_s=await broker.now_s(),
    )
    await broker.put_file(file, data)
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


async def _bounded(part: BodyPartReader, limit: int) -> bytes | None:
    """None: it is longer."""
    data = bytearray()
    while chunk := await part.read_chunk():
        data += chunk
        if len(data) > limit:
            return None
    return bytes(data)
