"""Unix time at this process's start, advanced by the monotonic clock."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def unix_s() -> float:
    return time.monotonic() + _OFFSET_S
