"""Unix time as it was when this process began, carried on by a clock that is never set."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def unix_s() -> float:
    return time.monotonic() + _OFFSET_S
