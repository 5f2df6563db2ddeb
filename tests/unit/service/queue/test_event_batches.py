"""A feed's entry: the events of one step in one piece, built at once where they are as `encode` writes them."""

from __future__ import annotations

import msgpack
import pytest

from service.errors import EndReason
from service.queue.codec import WireError, decode, decode_events, encode, pack_ids
from service.queue.messages import Event, Part, Usage

FIRST = Event(job_id="J", number=1, parts=(Part(tokens=pack_ids([5])), Part(branch=1, end=EndReason.STOP)))
ENDED = Event(job_id="J", number=2, end=EndReason.LENGTH, usage=Usage(prompt_tokens=1, completion_tokens=2))


def batch_of(*events: bytes) -> bytes:
    """Pack events as `publish.lua` does."""
    return msgpack.Packer().pack_array_header(len(events)) + b"".join(events)


@pytest.mark.parametrize("num_times", [1, 2, 100], ids="{} times".format)
def test_a_batch_gives_the_wanted_events_in_order(num_times):
    events = [Event(job_id=job_id, number=number) for number in range(num_times) for job_id in ("A", "B", "C")]
    batch = batch_of(*map(encode, events))
    assert list(decode_events(batch, {"A", "C"})) == [event for event in events if event.job_id != "B"]
    assert list(decode_events(batch_of(), {"A"})) == []


def test_events_that_others_have_put_in_order_are_read_too():
    fields = msgpack.unpackb(encode(ENDED))
    turned = msgpack.packb(dict(reversed(fields.items())))
    assert decode(Event, turned) == ENDED
    assert list(decode_events(batch_of(turned, encode(FIRST)), {"J"})) == [ENDED, FIRST]


def repeated(event: bytes, field: str, value: object) -> bytes:
    return bytes([event[0] + 1]) + event[1:] + msgpack.packb(field) + msgpack.packb(value)


@pytest.mark.parametrize("field", ["number", "job_id", "v", "surprise"])
def test_a_repeated_field_is_refused_anywhere(field):
    event = Event(job_id="A", number=1)
    wrong = repeated(encode(event), field, {"job_id": "A"}.get(field, 1))
    with pytest.raises(WireError):
        decode(Event, wrong)
    with pytest.raises(WireError):
        list(decode_events(batch_of(wrong), {"A"}))


@pytest.mark.parametrize(
    "tail", [b"\xc1", b"\x90", b"\x81\xa1v", b"\x80", b"\x82\xa1v\x02\xa6job_id\xa1A", b"\x91" * 2000, b""]
)
def test_a_broken_batch_gives_what_was_whole(tail):
    event = Event(job_id="A", number=1)
    events = decode_events(batch_of(encode(event), tail), {"A"})
    assert next(events) == event
    with pytest.raises(WireError):
        next(events)
    with pytest.raises(WireError):
        list(decode_events(batch_of(encode(event)) + b"\xc0", {"A"}))
