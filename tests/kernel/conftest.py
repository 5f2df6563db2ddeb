"""Opens the GPU for kernel tests, which are skipped with a reason without one."""

from __future__ import annotations

import importlib
import zlib
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from tests.support.kernel_checks import NUMPY_DTYPES


@cache
def missing() -> str | None:
    """Return what these tests need and this machine lacks."""
    for package in ("nvmath", "cupy"):
        if find_spec(package) is None:
            return f"needs the packages of the cuda extra: no {package}"
    try:
        importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return None


class SkippedModule(pytest.Module):
    """Module skipped as a whole: reporting each of some 2,700 tests takes 25 s of CPU time."""

    def collect(self):
        assert self.obj is not None  # imported: a wrong import is found without a GPU too
        pytest.skip(missing(), allow_module_level=True)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith("test_speed"):
            item.add_marker(pytest.mark.whole_gpu)


def pytest_pycollect_makemodule(module_path, parent):
    return None if missing() is None else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def open_ops():
    """Return a function: names of the dtypes of activations and cache -> poisoned GPU backend, one per pair."""
    backend = importlib.import_module("tests.fakes.poisoned_ops")
    opened = {}

    def open_(dtype: str, kv_dtype: np.dtype | None = None):
        key = dtype, NUMPY_DTYPES[dtype] if kv_dtype is None else kv_dtype
        if key not in opened:
            opened[key] = backend.PoisonedOps(NUMPY_DTYPES[dtype], kv_dtype)
        return opened[key]

    return open_


@pytest.fixture(scope="session")
def open_hopper_ops(open_ops):
    """Return a function like `open_ops`, for kernels with Hopper's instructions."""

    def open_(dtype: str, kv_dtype: np.dtype | None = None):
        ops = open_ops(dtype, kv_dtype)
        if ops.arch != "90a":
            pytest.skip(f"needs a Hopper GPU, not sm_{ops.arch}")
        return ops

    return open_


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Return a generator per test, seeded alike in each run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
