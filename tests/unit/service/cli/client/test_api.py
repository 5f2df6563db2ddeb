"""Server-sent events, cut from bytes."""

from __future__ import annotations

import pytest

from service.cli.client.api import MAX_EVENT_BYTES, EventLines


def test_events_are_cut_wherever_the_bytes_break():
    stream = b': hello\n\nid: 3\ndata: {"a": 1}\r\n\r\ndata:[DONE]\n\n'
    for size in (1, 2, 7, len(stream)):
        lines = EventLines()
        found = [event for i in range(0, len(stream), size) for event in lines.feed(stream[i : i + size])]
        assert found == [b'{"a": 1}', b"[DONE]"]


def test_an_event_without_end_is_refused():
    with pytest.raises(ValueError, match="without end"):
        EventLines().feed(b"x" * (MAX_EVENT_BYTES + 1))
