import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.engine.request import EngineRequest
from tests.support.demo_engine import DemoEngines
from tests.support.received import run_steps

LONG = (0, 3, *range(300, 360), 1, 4)


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


def request(name, prompt=LONG, **params):
    sampling = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | params)
    return EngineRequest(request_id=name, prompt=prompt, sampling=sampling)


def run(engine, *requests):
    for one in requests:
        engine.add_request(one)
    return {name: received.branches for name, received in run_steps(engine).items()}


def test_the_model_itself_drafts_its_own_tokens(engines):
    """All its drafts are right: its keys are those of the tokens, through catch-ups, rejections and cached prefixes."""
    plain, engine = engines.make(), engines.make(draft=engines.model, prefix_caching=True)
    wanted = run(plain, request("a"))
    for name in ("a", "b"):
        assert run(engine, request(name)) == {name: wanted["a"]}
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30
    assert stats.num_steps < 12


def test_a_preempted_sequence_is_drafted_for_again(engines):
    """The pool holds one and a half sequences; greedy drafts of the model itself stay right."""
    requests = [request(name, LONG[: 20 + 3 * index], max_tokens=60) for index, name in enumerate("abc")]
    engine = engines.make(num_blocks=16, draft=engines.model)
    assert run(engine, *requests) == run(engines.make(), *requests)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens


def test_an_ended_sequence_keeps_nothing(engines):
    engine = engines.make(draft=engines.model)
    run(engine, request("a", max_tokens=3))
    assert engine.speculation._drafter._read == {}
