"""Codec. Input is checked against limits before it is built, then against types: unknown and missing fields are
refused."""

from __future__ import annotations

import dataclasses
import math
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgpack
import msgspec

from service.queue.messages import (
    MAX_PARTS,
    VERSION,
    Cancel,
    DeadLetter,
    Event,
    IngressJob,
    Job,
    Reply,
    RequestRecord,
    WorkerCard,
)
from service.typed_decoding import convert

Message = TypeVar("Message", Job, Event, Cancel, WorkerCard, RequestRecord, DeadLetter, IngressJob, Reply)


class WireError(ValueError):
    """Invalid payload. The text omits the payload's values."""


@dataclass(frozen=True)
class Limits:
    """Payload limits: an empty list takes 1 byte in a payload, 60 in memory."""

    max_bytes: int
    max_array_len: int
    max_map_len: int
    max_containers: int


LIMITS: dict[type, Limits] = {
    Job: Limits(max_bytes=8 << 20, max_array_len=1024, max_map_len=64, max_containers=2048),
    Event: Limits(max_bytes=1 << 20, max_array_len=MAX_PARTS, max_map_len=16, max_containers=80),
    Cancel: Limits(max_bytes=1 << 10, max_array_len=8, max_map_len=8, max_containers=8),
    RequestRecord: Limits(max_bytes=4 << 20, max_array_len=1024, max_map_len=16, max_containers=8),
    WorkerCard: Limits(max_bytes=768 << 10, max_array_len=64, max_map_len=512, max_containers=80),
    DeadLetter: Limits(max_bytes=9 << 20, max_array_len=8, max_map_len=8, max_containers=8),
    IngressJob: Limits(max_bytes=2 << 20, max_array_len=4096, max_map_len=4096, max_containers=1 << 17),
    Reply: Limits(max_bytes=1 << 20, max_array_len=1024, max_map_len=64, max_containers=1024),
}
MAX_BATCH_BYTES = 64 << 20
MAX_PLAIN_BYTES = 1 << 20
"""Containers of longer payloads are counted before decoding."""
MAX_BODY_DEPTH = 64
INGRESS_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def encode(message: Message) -> bytes:
    """Return a msgpack map without None and (). Raises WireError for other values or above the limit."""
    try:
        plain = message if isinstance(message, msgspec.Struct) else {"v": VERSION, **_present(message)}
        payload = _ENCODER.encode(plain)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError("the message holds a value that msgpack cannot carry") from error
    if len(payload) > LIMITS[type(message)].max_bytes:
        raise WireError(f"the message takes {len(payload)} bytes, {LIMITS[type(message)].max_bytes} are allowed")
    return payload


_ENCODER = msgspec.msgpack.Encoder()
_EVENT = msgspec.msgpack.Decoder(Event)
_EVENTS = msgspec.msgpack.Decoder(list[Event])


def _present(message: Any) -> dict[str, Any]:
    present = {name: value for name, value in vars(message).items() if value is not None and value != ()}
    for name, value in present.items():
        if type(value) is tuple and dataclasses.is_dataclass(value[0]):
            present[name] = [_present(item) for item in value]
    return present


def decode(kind: type[Message], payload: bytes) -> Message:
    """Decode a message. Raises only WireError."""
    limits = LIMITS[kind]
    if len(payload) > limits.max_bytes:
        raise WireError(f"the message takes {len(payload)} bytes, {limits.max_bytes} are allowed")
    if kind is Event and (event := _as_written(_EVENT, payload)) is not None:
        decoded: Message = event
        return decoded
    return _typed(kind, unpack(payload, limits))


def decode_events(batch: bytes, wanted: Collection[str]) -> Iterator[Event]:
    """Yield the events of jobs in `wanted`. Raises WireError at the first broken event."""
    if len(batch) > MAX_BATCH_BYTES:
        raise WireError(f"the batch takes {len(batch)} bytes, {MAX_BATCH_BYTES} are allowed")
    events = _as_written(_EVENTS, batch)
    if events is None:
        events = (_typed(Event, raw) for raw in unpack_each(batch, LIMITS[Event]))
    for event in events:
        if event.job_id in wanted:
            yield event


def _as_written(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    """Decode what `encode` wrote, fast; return None otherwise."""
    if len(payload) > MAX_PLAIN_BYTES:
        return None
    try:
        decoded = decoder.decode(payload)
    except (ValueError, RecursionError):
        return None
    return decoded if _ENCODER.encode(decoded) == payload else None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return little-endian uint32. Raises WireError outside 0..2^32-1."""
    return _pack("I", token_ids)


def unpack_ids(packed: bytes) -> list[int]:
    """Unpack little-endian uint32. Raises WireError unless the length is a multiple of 4."""
    return _unpack("I", packed)


def pack_floats(values: Sequence[float]) -> bytes:
    """Return little-endian float32; out-of-range values become infinite."""
    return _pack("f", values)


def unpack_floats(packed: bytes) -> list[float]:
    """Unpack little-endian float32. Raises WireError unless the length is a multiple of 4."""
    return _unpack("f", packed)


def _pack(code: str, values: Sequence[float]) -> bytes:
    try:
        words = array(code, values)
    except (OverflowError, TypeError) as error:
        raise WireError("a value does not fit 32 bits") from error
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _unpack(code: str, packed: bytes) -> list[Any]:
    if len(packed) % 4:
        raise WireError(f"packed values take 4 bytes each, {len(packed)} are there")
    words = array(code, packed)
    if byteorder == "big":
        words.byteswap()
    return words.tolist()


def _typed(kind: type[Message], raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise WireError("a message is a map")
    version = raw.get("v")
    if type(version) is not int or version != VERSION:
        raise WireError(f"field v: this side speaks version {VERSION}")
    if kind is not IngressJob:
        del raw["v"]
    _refuse_unknown(_KNOWN[kind], raw)
    try:
        message: Any = convert(raw, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError(_bounded_text(error)) from error
    return cast(Message, _checked_ingress(message) if kind is IngressJob else message)


def _bounded_text(error: Exception) -> str:
    """Return the text without a wrong enum value, which may be long."""
    text = str(error)
    return "an unknown enum value" if text.startswith("Invalid enum value") else text[:200]


@dataclass(frozen=True)
class _Fields:
    names: frozenset[str]
    inner: dict[str, _Fields]

    @classmethod
    def of(cls, kind: type) -> _Fields:
        inner = {}
        for name, hint in get_type_hints(kind).items():
            for part in (hint, *get_args(hint)):
                if isinstance(part, type) and (dataclasses.is_dataclass(part) or issubclass(part, msgspec.Struct)):
                    inner[name] = cls.of(part)
        return cls(frozenset(get_type_hints(kind)), inner)


_KNOWN = {kind: _Fields.of(kind) for kind in LIMITS}


def _refuse_unknown(known: _Fields, raw: dict[str, Any]) -> None:
    """Refuse unknown fields, which msgspec ignores in dataclasses."""
    if not raw.keys() <= known.names:
        raise WireError("an unknown field")
    for name, fields in known.inner.items():
        value = raw.get(name)
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, dict):
                _refuse_unknown(fields, item)


def _checked_ingress(job: IngressJob) -> IngressJob:
    if not INGRESS_ID.fullmatch(job.id):
        raise WireError(f"field id: {INGRESS_ID.pattern} is allowed")
    prompt = job.body.get("prompt")
    if not isinstance(prompt, bytes):
        _refuse_non_json(job.body)
        return job
    rest = {name: value for name, value in job.body.items() if name != "prompt"}
    _refuse_non_json(rest)
    return dataclasses.replace(job, body={**rest, "prompt": unpack_ids(prompt)})


def _refuse_non_json(value: Any) -> None:
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_BODY_DEPTH:
            raise WireError(f"field body: lists and maps nest at most {MAX_BODY_DEPTH} deep")
        if isinstance(item, bytes) or (isinstance(item, float) and not math.isfinite(item)):
            raise WireError("field body: JSON has no bytes, NaN or infinity")
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise WireError("field body: keys are text")
            stack.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            stack.extend((inner, depth + 1) for inner in item)


def unpack(payload: bytes, limits: Limits) -> Any:
    """Decode a payload whose size was checked. Raises WireError."""
    try:
        return msgpack.unpackb(payload, **_Guard(limits).options(len(payload)))
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack within the limits: {_cause(error)}") from error


def unpack_each(batch: bytes, limits: Limits) -> Iterator[Any]:
    """Yield the values of a batch. Raises WireError at the first broken value."""
    guard = _Guard(limits)
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(batch)), **guard.options(len(batch)))
    unpacker.feed(batch)
    try:
        for _ in range(unpacker.read_array_header()):
            guard.num_containers = 0
            yield unpacker.unpack()
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack within the limits: {_cause(error)}") from error
    if unpacker.tell() < len(batch):
        raise WireError("bytes after the list")


class _Guard:
    def __init__(self, limits: Limits):
        self._limits = limits
        self.num_containers = 0

    def options(self, num_bytes: int) -> dict[str, Any]:
        return {
            "raw": False,
            "strict_map_key": True,
            "max_array_len": min(self._limits.max_array_len, num_bytes),
            "max_map_len": min(self._limits.max_map_len, num_bytes),
            "max_str_len": num_bytes,
            "max_bin_len": num_bytes,
            "max_ext_len": 0,
            "ext_hook": _refuse_extension,
            "list_hook": self._list,
            "object_pairs_hook": self._map,
        }

    def _list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def _map(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self._count()
        built = dict(pairs)
        if len(built) != len(pairs):
            raise WireError("a map repeats a key")
        return built

    def _count(self) -> None:
        self.num_containers += 1
        if self.num_containers > self._limits.max_containers:
            raise WireError(f"more than {self._limits.max_containers} lists and maps")


def _refuse_extension(code: int, data: bytes) -> None:
    raise WireError("msgpack extension types are not used here")


def _cause(error: Exception) -> str:
    """Return the text without broken UTF-8, the only value in msgpack's texts."""
    if isinstance(error, UnicodeError):
        return "text that is not UTF-8"
    if isinstance(error, msgpack.StackError):
        return "nested too deeply"
    if isinstance(error, msgpack.ExtraData):
        return "bytes after the message"
    if "max_ext_len" in str(error):
        return "an extension type"
    return str(error).rstrip(".") or type(error).__name__
