"""Requests that combine the options at random, in a pool too small for them, on a group of GPUs: NumPy's tokens."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.demo_engine import TWO_LAYERS, DemoEngines
from tests.unit.service.engine.test_any_options import SEEDS, check_together_in_need_as_alone

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def steady():
    return DemoEngines(NumpyOps(np.dtype(np.float32)), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def engines(open_group):
    return DemoEngines(open_group("float32"), num_layers=TWO_LAYERS)


@pytest.mark.parametrize("seed", SEEDS)
def test_together_in_need_as_alone(engines, steady, seed):
    check_together_in_need_as_alone(engines, steady, seed, 1e-3)
