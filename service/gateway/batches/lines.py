"""The lines of a batch: requests to read, answers to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.openai.answers import encode_json, error_json
from service.gateway.openai.bodies import present
from service.gateway.openai.strict_json import decode_object
from service.wire.batches import BatchError

MAX_LINES = 50_000  # OpenAI's own
MAX_ERRORS = 20
MAX_ID_CHARS = 512


class BatchLine(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadInput(Exception):
    """The file cannot be a batch: nothing of it was done."""

    errors: tuple[BatchError, ...]


def read_lines(data: bytes, endpoint: str) -> Sequence[BatchLine]:
    """The requests of an input file. Raises BadInput with what is wrong, line by line, as far as the first errors."""
    rows = [(number, row) for number, row in enumerate(data.split(b"\n"), 1) if row.strip()]
    if not rows:
        raise BadInput((BatchError(code="empty_file", message="The file holds no request."),))
    if len(rows) > MAX_LINES:
        raise BadInput((BatchError(code="too_many_requests", message=f"More than {MAX_LINES} requests."),))
    lines: list[BatchLine] = []
    errors: list[BatchError] = []
    seen: set[str] = set()
    for number, row in rows:
        try:
            line = _read(row, endpoint)
            if line.custom_id in seen:
                raise ValueError("The custom_id stands in an earlier line too.")
        except ValueError as error:
            errors.append(BatchError(code="invalid_line", message=str(error), line=number))
            if len(errors) == MAX_ERRORS:
                break
        else:
            seen.add(line.custom_id)
            lines.append(line)
    if errors:
        raise BadInput(tuple(errors))
    return lines


def _read(row: bytes, endpoint: str) -> BatchLine:
    """Raises ValueError with words for whoever wrote the line."""
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
    return line


def answer_line(name: str, custom_id: str, request_id: str, body: Any) -> bytes:
    return _line(name, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refusal_line(name: str, custom_id: str, error: RequestError) -> bytes:
    return _line(name, custom_id, {"status_code": error.status, "request_id": None, "body": error_json(error)}, None)


def undone_line(name: str, custom_id: str, code: str, message: str) -> bytes:
    """Of a request that was not carried out."""
    return _line(name, custom_id, None, {"code": code, "message": message})


def is_success(line: bytes) -> bool:
    answer = msgspec.json.decode(line)["response"]
    return answer is not None and answer["status_code"] == 200


def _line(name: str, custom_id: str, response: Any, error: Any) -> bytes:
    return encode_json({"id": name, "custom_id": custom_id, "response": response, "error": error})
