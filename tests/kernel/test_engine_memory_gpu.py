"""The whole engine on the device with every memory operation, while unheld blocks are NaN."""

import time

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.demo_engine import DemoEngines, run_all

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engines(open_ops):
    return DemoEngines(open_ops("float32"))


@pytest.fixture(scope="module")
def by_themselves():
    return DemoEngines(NumpyOps(np.dtype(np.float32))).each_alone()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_poisoned_blocks_are_never_read(engines, by_themselves, prefix_caching, num_host_blocks):
    engine = engines.make(num_blocks=22, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks, poisons=True)
    while engine._executor.num_host_blocks < num_host_blocks:
        assert engine._executor.host.failure is None
        time.sleep(0.001)  # pinned in the background
    for _ in range(2):
        received = run_all(engine)
        assert {name: tokens for name, (tokens, _) in received.items()} == by_themselves
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped > 0) == (num_host_blocks > 0)
    assert (stats.num_blocks_in > 0) == (num_host_blocks > 0)
    assert (stats.num_hit_tokens > 0) == prefix_caching
