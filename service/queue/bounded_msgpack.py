"""msgpack from strangers to plain values, bounded before it is built: sizes, lengths, the number of containers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack


class WireError(ValueError):
    """A payload that is not what was asked for. Its text names no value of the payload."""


@dataclass(frozen=True)
class Limits:
    """What a payload may make us build. Containers are lists and maps: an empty one costs 1 byte there, 60 here."""

    max_bytes: int
    max_array_len: int
    max_map_len: int
    max_containers: int


def unpack(payload: bytes, limits: Limits) -> Any:
    """The one value in `payload`, whose size its caller has checked. Raises WireError."""
    try:
        return msgpack.unpackb(payload, **_Guard(limits).options(len(payload)))
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack within the limits: {_cause(error)}") from error


def unpack_each(batch: bytes, limits: Limits) -> Iterator[Any]:
    """The values of the list in `batch`, each within `limits`. Raises WireError where the batch breaks."""
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
        raise WireError("bytes behind the list")


class _Guard:
    """Counts containers while they are built and refuses what no message holds: extensions, repeated keys."""

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
    """msgpack's own words hold no values but for text that is not UTF-8, whose bytes they would show."""
    if isinstance(error, UnicodeError):
        return "text that is not UTF-8"
    if isinstance(error, msgpack.StackError):
        return "nested too deeply"
    return str(error).rstrip(".") or type(error).__name__
