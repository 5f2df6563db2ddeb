"""The C library's heap, which serves NumPy's temporary arrays."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
KEPT_BYTES = 64 << 20
MAPPED_BYTES = 32 << 20
"""The largest threshold that mallopt takes."""


def keep_freed_memory() -> None:
    """Let the process keep up to 64 MiB of freed memory per arena. Does nothing without glibc.

    Threads other than the main one return it earlier by default: the pages of each step's arrays are then faulted in
    again, 6 % of the demo model's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
    mallopt(TRIM_THRESHOLD, KEPT_BYTES)
