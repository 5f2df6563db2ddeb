"""Adapters on a group of GPUs: mixed batches, slots rewritten between steps, preemption; NumPy's tokens."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.kernel.test_adapters_gpu import RANKS, requests_of
from tests.support.adapters import source_of, write_adapter
from tests.support.demo_engine import DemoEngines
from tests.support.received import run_steps

pytestmark = pytest.mark.gpu
SIZES = (
    {"num_adapter_slots": 5},
    {"num_adapter_slots": 2},
    {"num_adapter_slots": 3, "num_blocks": 22, "prefix_caching": True, "num_host_blocks": 40},
)


@pytest.fixture(scope="module")
def on_numpy():
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


@pytest.fixture(scope="module")
def sources(on_numpy, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("adapters"), on_numpy.model.config
    written = [write_adapter(folder / str(rank), config, rank=rank, seed=rank, strength=2.0) for rank in RANKS]
    return [source_of(one, config, np.dtype(np.float32)) for one in written]


def branches_of(made: DemoEngines, sources, sizes):
    engine = made.make(max_num_seqs=12, **sizes)
    for request in requests_of(sources, 18):
        engine.add_request(request)
    return {name: one.by_branch() for name, one in run_steps(engine).items()}


@pytest.fixture(scope="module")
def wanted(on_numpy, sources):
    return branches_of(on_numpy, sources, SIZES[0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_requests_with_and_without_adapters(open_group, sources, wanted, sizes):
    assert branches_of(DemoEngines(open_group("float32")), sources, sizes) == wanted
