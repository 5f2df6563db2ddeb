"""The whole engine on the device, a step ahead and on captured graphs, against the same engine on NumPy."""

import numpy as np
import pytest

from model.ops.numpy_ops import NumpyOps
from tests.support.demo_engine import DemoEngines, tell_all

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engines(open_ops):
    return DemoEngines(open_ops("float32"))


@pytest.fixture(scope="module")
def on_numpy():
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


@pytest.mark.parametrize("sizes", [{}, {"budget": 16}, {"num_blocks": 22}], ids=str)
def test_every_request_gets_the_same_tokens(engines, on_numpy, sizes):
    engine = engines.make(**sizes)
    told = tell_all(engine)
    assert {name: tokens for name, (tokens, _) in told.items()} == on_numpy.each_alone()
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in sizes)


def test_logprobs_agree(engines, on_numpy):
    ours, theirs = (tell_all(made.make())["3"][1] for made in (engines, on_numpy))
    np.testing.assert_allclose([one.logprob for one in ours], [one.logprob for one in theirs], atol=1e-4)
    assert [one.top_ids for one in ours] == [one.top_ids for one in theirs]


def test_penalties_wait_for_the_tokens_they_count(engines, on_numpy):
    wishes = [{"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2, "ignore_eos": True}] * 3
    assert tell_all(engines.make(), wishes) == tell_all(on_numpy.make(), wishes)
