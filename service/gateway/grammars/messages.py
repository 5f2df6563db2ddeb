"""What a gateway and its grammar processes say to each other: JSON and msgpack in frames, a length before each."""

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
    """The first frame to a new process."""

    tokens: TokenTable
    max_cpu_s: float  # for one grammar
    max_memory_bytes: int  # on top of what the process takes when it is idle


@dataclass(frozen=True)
class Reply:
    """To each frame: the grammar's text, or what is wrong with the task; neither after Hello."""

    text: str | None = None
    error: str | None = None
    is_spent: bool = False  # the process has grown and ends


encode_hello = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
encode_task = msgspec.json.Encoder().encode  # JSON: msgpack has no integers of more than 64 bits
decode_task = msgspec.json.Decoder(GrammarTask).decode
encode_reply = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data
