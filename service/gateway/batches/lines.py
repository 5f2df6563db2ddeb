"""The lines of a batch: requests to read, answers to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.openai.answers import encode_json, error_json
from service.gateway.openai.bodies import present
from service.gateway.openai.strict_json import decode_object
from service.queue.batches import Batch, BatchError

MAX_LINES = 50_000  # OpenAI's own
MAX_ERRORS = 20
MAX_ID_CHARS = 512
UNDONE_BYTES = 512
"""What the line of a request that was not carried out takes at most, besides its custom_id."""
MAX_ANSWER_BYTES = 8 << 20
"""The queue takes no longer value than 16 MiB."""


class BatchLine(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class AskedLine(msgspec.Struct, kw_only=True, frozen=True):
    """A line that was checked, with its body as it came."""

    custom_id: str
    body: msgspec.Raw


@dataclass(frozen=True)
class BadInput(Exception):
    """The file cannot be a batch: nothing of it was done."""

    errors: tuple[BatchError, ...]


def check_line(row: bytes, endpoint: str) -> str:
    """The line's custom_id. Raises ValueError with a message for the author of the line."""
    try:
        line = msgspec.convert(present(decode_object(row), BatchLine), BatchLine, strict=True)
    except RequestError:
        raise ValueError("The line is no JSON object.") from None
    except msgspec.ValidationError:
        raise ValueError("A line has custom_id, method, url and body, and nothing else.") from None
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise ValueError(f"The custom_id must have 1 to {MAX_ID_CHARS} characters.")
    if line.method != "POST" or line.url != endpoint:
        raise ValueError(f"The method must be POST and the url {endpoint}.")
    return line.custom_id


def read_line(row: bytes) -> AskedLine:
    """A line that was checked."""
    return msgspec.json.decode(row, type=AskedLine)


def line_name(batch: Batch, number: int) -> str:
    return f"{batch.batch_id}_{number}"


def answer_line(name: str, custom_id: str, request_id: str, body: Any) -> bytes:
    return _line(name, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refusal_line(name: str, custom_id: str, error: RequestError) -> bytes:
    return _line(name, custom_id, {"status_code": error.status, "request_id": None, "body": error_json(error)}, None)


def undone_line(name: str, custom_id: str | None, code: str, message: str) -> bytes:
    """Of a request that was not carried out."""
    return _line(name, custom_id, None, {"code": code, "message": message})


def _line(name: str, custom_id: str | None, response: Any, error: Any) -> bytes:
    return encode_json({"id": name, "custom_id": custom_id, "response": response, "error": error})
