"""Groups of GPUs for these tests: two ranks on one card, and a rank on each of 2 and 4 cards if present."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from tests.support.kernel_checks import NUMPY_DTYPES

CARDS = {"2 cards": (0, 1), "one card": (0, 0), "4 cards": (0, 1, 2, 3)}

ORDER = ("test_open", "test_sum_add_rms_norm", "test_late_rank", "test_sum_ranks", "test_many_sums")
"""Basic tests first: peers reach each other, one sum is right, a hang ends. Then all others, by name."""

LIMIT_S = 100


def pytest_collection_modifyitems(items):
    files = set(Path(__file__).parent.glob("test_*.py"))
    here = [item for item in items if item.path in files]
    names = {item: item.path.stem for item in here}
    ranked = iter(sorted(here, key=lambda item: ORDER.index(names[item]) if names[item] in ORDER else len(ORDER)))
    for item in here:  # a hang in the driver ends too
        item.add_marker(pytest.mark.timeout(LIMIT_S, method="thread"))
    items[:] = [next(ranked) if item in names else item for item in items]


@pytest.fixture(scope="session")
def open_cards():
    """Name of a dtype, dtype of the cache, cards -> a new group, its temporaries poisoned."""
    opening = importlib.import_module("model.ops.gpu.group.open")
    fakes = importlib.import_module("tests.fakes.poisoned_ops")

    def open_(dtype: str, cards: tuple[int, ...], kv_dtype: np.dtype | None = None):
        num_visible = importlib.import_module("cupy").cuda.runtime.getDeviceCount()
        if max(cards) >= num_visible:
            pytest.skip(f"needs {max(cards) + 1} GPUs, {num_visible} visible")
        return opening.open_devices(NUMPY_DTYPES[dtype], kv_dtype, cards, fakes.PoisonedRank, opens_nccl=True)

    return open_


@pytest.fixture(scope="session", params=CARDS)
def open_group(request, open_cards):
    """Return a function like `open_cards`, with one group per dtype."""
    opened = {}

    def open_(dtype: str, kv_dtype: np.dtype | None = None):
        key = dtype, kv_dtype
        if key not in opened:
            opened[key] = open_cards(dtype, CARDS[request.param], kv_dtype)
        return opened[key]

    return open_
