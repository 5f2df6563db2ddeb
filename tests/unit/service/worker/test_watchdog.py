"""The watchdog: quiet while the engine turns, loud once when it hangs, and able to end what holds the interpreter."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time

import pytest

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from service.observability.systemd import Supervisor
from service.worker import engine_thread
from service.worker.engine_thread import Add, EngineThread, Stop
from service.worker.watchdog import EngineHung, Watchdog
from tests.fakes.scripted_executor import ScriptedExecutor

WAIT_S = 10


class Gate(ScriptedExecutor):
    """Hangs in every step until it is opened."""

    def __init__(self):
        super().__init__(64, 4)
        self.opened = threading.Event()
        self.entered = threading.Event()

    def launch(self, plan):
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return super().launch(plan)


class Fed(Supervisor):
    def __init__(self):
        super().__init__({})
        self.num_feeds = 0

    def feed(self):
        self.num_feeds += 1


class House:
    def __init__(self, executor, step_timeout_s):
        self.hangs, self.fed = queue.Queue(), Fed()
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_prefill_chunk=16, max_model_len=256)
        engine = Engine(executor, Scheduler(KVManager(64, 4), limits), frozenset())
        self.watchdog = Watchdog(step_timeout_s, self.fed)
        self.thread = EngineThread(engine, lambda outputs: None, self.hangs.put, self.watchdog.on_turn)
        self.thread.start()
        self.watchdog.watch(self.thread, self.hangs.put)

    def work(self):
        self.thread.send(Add(EngineRequest(request_id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=5))))

    def close(self):
        self.thread.send(Stop(EndReason.SHUTDOWN))
        assert self.thread.join(WAIT_S)
        self.watchdog.stop()


def test_a_hung_step_is_reported_once_with_its_place(caplog):
    gate = Gate()
    house = House(gate, step_timeout_s=0.2)
    house.work()
    assert gate.entered.wait(WAIT_S)
    num_feeds = house.fed.num_feeds
    error = house.hangs.get(timeout=WAIT_S)
    assert isinstance(error, EngineHung)
    assert house.thread.silent_s > 0.2
    assert house.fed.num_feeds == num_feeds, "who hangs does not feed the supervisor"
    assert "wait" in caplog.text
    assert "launch" in caplog.text
    gate.opened.set()
    house.close()
    assert house.hangs.empty()


def test_an_idle_engine_feeds_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(engine_thread, "IDLE_TURN_S", 0.02)
    house = House(ScriptedExecutor(64, 4), step_timeout_s=5.0)
    give_up_s = time.monotonic() + WAIT_S
    while house.fed.num_feeds < 50:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert house.thread.silent_s < 5.0
    assert house.hangs.empty()
    house.close()


ARMED = """
import ctypes, time
from service.observability.systemd import Supervisor
from service.worker import watchdog
watchdog.LAST_RESORT_S = 0.2
dog = watchdog.Watchdog(0.5, Supervisor({}))
def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(60)
dog.on_turn(time.monotonic())
"""


def run_python(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)


@pytest.mark.timeout(50)
def test_a_step_that_holds_the_interpreter_is_ended_too():
    ended = run_python(ARMED + "hold_the_interpreter()")
    assert ended.returncode == 1
    assert "hold_the_interpreter" in ended.stderr


def test_a_watchdog_that_was_stopped_ends_no_process():
    ended = run_python(ARMED + "dog.stop(); time.sleep(1.5)")
    assert (ended.returncode, ended.stderr) == (0, "")
