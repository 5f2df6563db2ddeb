"""Server-sent events as a client reads them."""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 20


class EventLines:
    """Cuts a stream of server-sent events into the data of each."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now. Raises ValueError for one that grows without end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event without end")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
