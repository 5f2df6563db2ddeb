from __future__ import annotations

import platform
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from model.ops.cpu.heap import keep_freed_memory


def work() -> int:
    """Return the page faults of freed and repeated temporary arrays."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(16):
        [np.ones(1 << 20, np.uint8) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
def test_a_thread_keeps_the_pages_of_its_temporary_arrays():
    keep_freed_memory()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()
        assert thread.submit(work).result() < 2048  # of 16 x 2048 pages
