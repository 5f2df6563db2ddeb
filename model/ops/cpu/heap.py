"""The C library's heap, which serves NumPy's temporary arrays."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
KEPT_BYTES = 64 << 20
MAPPED_BYTES = 32 << 20
"""The largest threshold that mallopt accepts."""


def keep_freed_memory() -> None:
    """Let the process keep up to 64 MiB of freed memory per arena. Do nothing without glibc.

    By default, threads other than the main one return memory earlier. The pages of each step's arrays are then faulted
    in again, which takes 6 % of the demo model's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
    mallopt(TRIM_THRESHOLD, KEPT_BYTES)
