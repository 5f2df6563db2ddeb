"""A request's memory is freed at its end, without Python's garbage collector."""

import gc
import weakref

import pytest

from model.sampling_params import BeamSearch, SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from tests.bench.host_steps import make_engine
from tests.fakes.scripted_executor import ScriptedExecutor

KINDS = {
    "one": {},
    "several": {"n": 3},
    "the best": {"n": 1, "best_of": 3},
    "beams": {"n": 2, "beam": BeamSearch(width=4)},
}


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def scripted():
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk=64, max_model_len=64)
    executor = ScriptedExecutor(64, 4, None, runs_ahead=True)
    return Engine(executor, Scheduler(KVManager(64, 4, prefix_caching=True), limits), frozenset()), executor


def begin(engine, name, params):
    """Weak references to the request's group and sequences."""
    engine.add_request(
        EngineRequest(request_id=name, prompt=(1, 2, 3, 4, 5), sampling=SamplingParams(max_tokens=6, **params))
    )
    engine.step()
    return [weakref.ref(one) for sequence in engine.running for one in (sequence, sequence.group)]


def finish(engine):
    while engine.has_work:
        engine.step()
    engine.drain_outputs()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["done", "cancelled"])
def test_requests_are_gone_once_another_runs(no_collector, kind, is_cancelled):
    engine, executor = scripted()
    held = begin(engine, "first", KINDS[kind])
    if is_cancelled:
        engine.cancel("first", EndReason.CANCELLED)
    finish(engine)
    begin(engine, "second", {})  # what a step knows of its sequences is there until the next one
    executor.plans.clear()
    assert held
    assert not any(one() for one in held)


def test_the_real_executor_keeps_no_more_than_its_last_step(no_collector):
    engine, _ = make_engine(4, 64, prefix_caching=True)
    held = begin(engine, "first", {})
    finish(engine)
    begin(engine, "second", {})
    finish(engine)
    assert not any(one() for one in held)
