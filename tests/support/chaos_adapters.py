"""Adapters of the chaos suite's jobs if CHAOS_LORA is set: none, the first, the second, in turn."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from service.engine.request import AdapterSource
from service.queue.messages import JobAdapter
from tests.support.adapters import source_of, write_adapter
from tests.support.demo_engine import DEMO
from tests.support.fleet import HAS_ADAPTERS


@cache
def _adapters() -> tuple[JobAdapter, ...]:
    folder, config = Path(tempfile.mkdtemp(prefix="chaos-adapters-")), ModelConfig.read(DEMO)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = []
    for rank in (8, 16):
        written = write_adapter(folder / f"r{rank}", config, rank=rank, seed=rank, strength=2.0)
        source = source_of(written, config, np.dtype(np.float32))
        found.append(JobAdapter(name=source.name, path=source.path, digest=source.digest))
    return tuple(found)


def adapter_of(number: int) -> JobAdapter | None:
    """Return the adapter of job `number`."""
    return (None, *_adapters())[number % 3] if HAS_ADAPTERS else None


def source_in(adapter: JobAdapter | None) -> AdapterSource | None:
    return None if adapter is None else AdapterSource(name=adapter.name, path=adapter.path, digest=adapter.digest)
