"""The thread around the engine: order of commands, the end of everything, and death."""

import queue

import pytest

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.output_processor import iter_request_outputs
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from service.worker.engine_thread import Add, Cancel, EngineThread, Stop
from tests.fakes.scripted_executor import ScriptedExecutor, next_token

WAIT_S = 10


class Harness:
    """A running thread whose outputs arrive in a queue."""

    def __init__(self, executor=None):
        self.outputs, self.deaths = queue.Queue(), queue.Queue()
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_prefill_chunk=16, max_model_len=256)
        engine = Engine(executor or ScriptedExecutor(64, 4), Scheduler(KVManager(64, 4), limits), frozenset())
        self.thread = EngineThread(
            engine, lambda outputs: list(map(self.outputs.put, iter_request_outputs(outputs))), self.deaths.put
        )
        self.thread.start()

    def add(self, name, max_tokens):
        params = SamplingParams(max_tokens=max_tokens)
        self.thread.send(Add(EngineRequest(request_id=name, prompt=(1, 2), sampling=params)))

    def until_end(self, name):
        tokens = []
        while True:
            output = self.outputs.get(timeout=WAIT_S)
            if output.request_id == name:
                tokens += [token for part in output.parts for token in part.token_ids]
                if output.end is not None:
                    return tokens, output.end


@pytest.fixture
def harness():
    made = Harness()
    yield made
    made.thread.send(Stop(EndReason.SHUTDOWN))
    made.thread.join(WAIT_S)


def test_an_idle_thread_wakes_for_a_request(harness):
    for name in ("first", "second"):
        harness.add(name, 3)
        tokens, end = harness.until_end(name)
        expected = [1, 2]
        for _ in range(3):
            expected.append(next_token(expected))
        assert (tokens, end) == (expected[2:], EndReason.LENGTH)
    assert harness.thread.stats.num_output_tokens >= 3


def test_cancel_reaches_a_running_request():
    harness = Harness(ScriptedExecutor(64, 4, step_s=0.02))
    harness.add("long", 250)
    harness.outputs.get(timeout=WAIT_S)
    harness.thread.send(Cancel("long", EndReason.CANCELLED))
    tokens, end = harness.until_end("long")
    assert end is EndReason.CANCELLED
    assert len(tokens) < 249
    harness.thread.send(Stop(EndReason.SHUTDOWN))
    harness.thread.join(WAIT_S)


def test_stop_ends_what_is_left(harness):
    harness.add("long", 250)
    harness.thread.send(Stop(EndReason.SHUTDOWN))
    assert harness.until_end("long")[1] is EndReason.SHUTDOWN
    harness.thread.join(WAIT_S)


class BrokenExecutor(ScriptedExecutor):
    """Computes some steps and dies."""

    def launch(self, plan):
        if len(self.plans) == 3:
            raise RuntimeError("device lost")
        return super().launch(plan)


def test_death_is_reported_and_its_requests_are_open_still():
    harness = Harness(BrokenExecutor(64, 4))
    harness.add("a", 5)
    assert isinstance(harness.deaths.get(timeout=WAIT_S), RuntimeError)
    outputs = [harness.outputs.get(timeout=WAIT_S) for _ in range(3)]
    assert [output.end for output in outputs] == [None, None, None]
    assert harness.outputs.empty()
    assert harness.thread.in_flight == {"a"}
    assert harness.thread.join(WAIT_S)


def test_the_thread_shows_that_it_moves_and_falls_silent_in_a_step():
    harness = Harness(ScriptedExecutor(64, 4, step_s=0.5))
    harness.add("a", 1)
    silent_s = max(harness.thread.silent_s for _ in iter(lambda: harness.outputs.empty(), False))
    assert 0.3 < silent_s < 2.0
    assert harness.until_end("a")[1] is EndReason.LENGTH
    assert harness.thread.silent_s < 1.0
    harness.thread.send(Stop(EndReason.SHUTDOWN))
    assert harness.thread.join(WAIT_S)


def test_tables_are_read_while_a_page_is_open():
    """And no longer: neither a map nor a table is left of an earlier look."""
    harness = Harness(ScriptedExecutor(64, 4, step_s=0.02))
    harness.add("long", 250)
    harness.outputs.get(timeout=WAIT_S)
    assert harness.thread.tables == ()
    harness.thread.set_watched(True)
    while not harness.thread.tables:
        harness.outputs.get(timeout=WAIT_S)
    (view,) = harness.thread.tables
    assert (view.request_id, view.num_prompt_tokens) == ("long", 2)
    assert len(harness.thread.blocks) == 64
    harness.thread.set_watched(False)
    while harness.thread.tables:
        harness.outputs.get(timeout=WAIT_S)
    assert harness.thread.blocks == b""
    harness.thread.send(Stop(EndReason.SHUTDOWN))
    harness.thread.join(WAIT_S)
