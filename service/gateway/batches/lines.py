"""Lines of a batch: reads requests, writes results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.openai.json_objects import encode_json, error_json
from service.gateway.openai.request_bodies import present
from service.gateway.openai.strict_json import decode_object
from service.queue.records import Batch, BatchError
from service.typed_decoding import convert, decode_json

MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 20
MAX_ID_CHARS = 512
NOT_RUN_LINE_BYTES = 512
"""Maximum size of the result line of a request that was not run, without its custom_id."""
MAX_ANSWER_BYTES = 8 << 20
"""The queue accepts values up to 16 MiB."""


class BatchLine(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class RequestLine(msgspec.Struct, kw_only=True, frozen=True):
    """A validated line with an unparsed body."""

    custom_id: str
    body: msgspec.Raw


@dataclass(frozen=True)
class BadInput(Exception):
    """The file is not a valid batch; no line was run."""

    errors: tuple[BatchError, ...]


def check_line(row: bytes, endpoint: str) -> str:
    """Return the line's custom_id. Raises ValueError with a message for the client."""
    try:
        line = convert(present(decode_object(row), BatchLine), BatchLine)
    except RequestError:
        raise ValueError("The line is not a JSON object.") from None
    except msgspec.ValidationError:
        raise ValueError("A line must have exactly custom_id, method, url and body.") from None
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise ValueError(f"The custom_id must have 1 to {MAX_ID_CHARS} characters.")
    if line.method != "POST" or line.url != endpoint:
        raise ValueError(f"The method must be POST and the url {endpoint}.")
    return line.custom_id


def read_line(row: bytes) -> RequestLine:
    return decode_json(row, RequestLine)


def line_name(batch: Batch, number: int) -> str:
    return f"{batch.batch_id}_{number}"


def answer_line(name: str, custom_id: str, request_id: str, body: Any) -> bytes:
    return _line(name, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refusal_line(name: str, custom_id: str, error: RequestError) -> bytes:
    return _line(name, custom_id, {"status_code": error.status, "request_id": None, "body": error_json(error)}, None)


def not_run_line(name: str, custom_id: str | None, code: str, message: str) -> bytes:
    """Return the result line of a request that was not run."""
    return _line(name, custom_id, None, {"code": code, "message": message})


def _line(name: str, custom_id: str | None, response: Any, error: Any) -> bytes:
    return encode_json({"id": name, "custom_id": custom_id, "response": response, "error": error})
