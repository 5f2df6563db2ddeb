"""Messages between a gateway and its grammar processes: length-prefixed JSON and msgpack."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import GrammarTask

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 30


@dataclass(frozen=True)
class Hello:
    """The first frame sent to a new process."""

    tokens: TokenTable
    max_cpu_s: float  # per grammar
    max_memory_bytes: int  # beyond an idle process's usage


@dataclass(frozen=True)
class Reply:
    """The grammar's text or the task's error; neither in reply to Hello."""

    text: str | None = None
    error: str | None = None
    is_spent: bool = False  # the process has grown and will exit


encode_hello = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
encode_task = msgspec.json.Encoder().encode  # msgpack has no integers beyond 64 bits
decode_task = msgspec.json.Decoder(GrammarTask).decode
encode_reply = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data
