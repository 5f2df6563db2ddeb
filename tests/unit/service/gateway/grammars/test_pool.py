"""Grammar processes: bounded in time and memory, fair, replaced when they end, stopped with the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from model.errors import GrammarError
from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import GrammarSpec, GrammarTask
from model.text.tokenizer import Tokenizer
from service.errors import RequestError
from service.gateway.grammars import queue
from service.gateway.grammars.pool import CompileLimits, GrammarPool, PackedTask
from service.gateway.grammars.process import GrammarProcess
from service.gateway.grammars.results import ENTRY_BYTES, TRANSIENT_TTL_S, Result, ResultCache
from tests.support.hostile_grammars import _lark
from tests.support.served import alive, descendants_of
from tests.support.source_tree import ROOT

DEMO = ROOT / "model" / "demo"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def tokens() -> TokenTable:
    return TokenTable.of(Tokenizer.read(DEMO), 4101, [1])


@asynccontextmanager
async def open_pool(tokens, on_result=print, **limits):
    pool = GrammarPool(tokens, asyncio.get_running_loop().time, CompileLimits(**limits), on_result)
    pool.start()
    try:
        await pool.wait_until_ready()
        yield pool
    finally:
        await pool.close()


def task(value, kind: str = "json") -> PackedTask:
    return PackedTask.of(GrammarTask(GrammarSpec(kind, value)))


def easy(number: int) -> PackedTask:
    return task({"type": "integer", "maximum": number})


def hard(number: int) -> PackedTask:
    return task(_lark(number), "grammar")


async def until(is_so) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


_OTHERS: set[int] = set()
"""Processes of other tests of this one."""


@pytest.fixture(autouse=True)
def _look_for_others():
    _OTHERS.clear()
    _OTHERS.update(alive(descendants_of(os.getpid())))


def pids() -> set[int]:
    return alive(descendants_of(os.getpid())) - _OTHERS


async def test_a_grammar_comes_back_as_text_and_a_bad_one_with_what_is_wrong(tokens):
    async with open_pool(tokens) as pool:
        assert '"maximum": 7' in await pool.compile(easy(7), "a")
        with pytest.raises(GrammarError, match="cannot be compiled"):
            await pool.compile(task("start: missing", "grammar"), "a")
        with pytest.raises(GrammarError, match="must have 1 to"):
            await pool.compile(task("", "regex"), "a")
        assert await pool.compile(task({"type": "string", "default": 1 << 70}), "a")


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"max_cpu_s": 0.3, "max_wall_s": WAIT_S}, "0.3 s"),
        ({"max_cpu_s": WAIT_S, "max_wall_s": 0.3}, "s to compile"),
        ({"max_cpu_s": WAIT_S, "max_wall_s": WAIT_S, "max_memory_bytes": 24 << 20}, "24 MiB"),
    ],
)
async def test_one_that_takes_too_much_is_refused_with_the_bound_and_the_next_one_is_served(tokens, limits, what):
    async with open_pool(tokens, num_processes=1, **limits) as pool:
        with pytest.raises(GrammarError, match=what):
            await pool.compile(hard(1), "a")
        begin_s = time.monotonic()
        with pytest.raises(GrammarError, match=what):  # again, and at once
            await pool.compile(hard(1), "b")
        assert time.monotonic() - begin_s < 0.2
        assert await pool.compile(easy(1), "a")


async def test_a_process_that_is_killed_is_replaced(tokens):
    async with open_pool(tokens, num_processes=1) as pool:
        (pid,) = pids()
        os.kill(pid, signal.SIGKILL)
        assert await pool.compile(easy(1), "a")
        assert pids() != {pid}


async def test_a_grammar_that_crashes_its_process_twice_is_refused(tokens, monkeypatch):
    ask, greeted = GrammarProcess.ask, set()

    async def crash(process, frame):
        if process.pid in greeted:
            os.kill(process.pid, signal.SIGSEGV)
        greeted.add(process.pid)
        return await ask(process, frame)

    monkeypatch.setattr(GrammarProcess, "ask", crash)
    async with open_pool(tokens, num_processes=1) as pool:
        with pytest.raises(GrammarError, match="crashed its compiler"):
            await pool.compile(easy(1), "a")
        assert len(greeted) >= 2


async def test_it_ignores_the_signals_of_its_group(tokens):
    async with open_pool(tokens, num_processes=1) as pool:
        (pid,) = pids()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert await pool.compile(easy(1), "a")
        assert pids() == {pid}


async def test_a_tenant_that_waits_gets_a_process_of_one_that_has_them_all(tokens):
    async with open_pool(tokens, max_cpu_s=WAIT_S, max_wall_s=WAIT_S, max_wait_s=WAIT_S) as pool:
        await until(lambda: pool.num_ready == 2)
        greedy = [asyncio.create_task(pool.compile(hard(i), "greedy")) for i in range(4)]
        await until(lambda: all(slot.job is not None for slot in pool._slots))
        begin_s = time.monotonic()
        assert await pool.compile(easy(1), "modest")
        assert time.monotonic() - begin_s < 10
        running = [slot.job for slot in pool._slots if slot.job is not None]
        assert len(running) <= 1, "tenants that take long share all processes but one"
        assert await pool.compile(easy(2), "modest")
        for each in greedy:
            each.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_one_that_leaves_gives_up_its_place(tokens):
    async with open_pool(tokens, num_processes=1, max_cpu_s=1.0) as pool:
        asked = [asyncio.create_task(pool.compile(hard(i), "a")) for i in range(5)]
        await until(lambda: pool._slots[0].job is not None)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert pool._queue.num_jobs == 0
        assert await pool.compile(easy(1), "a")
        assert pool._jobs == {}


async def test_the_same_grammar_is_compiled_once(tokens):
    heard = []
    async with open_pool(tokens, on_result=heard.append) as pool:
        found = await asyncio.gather(*(pool.compile(easy(5), tenant) for tenant in "aaabbb"))
        assert len(set(found)) == 1
        assert pool._jobs == {}
        with pytest.raises(GrammarError):
            await pool.compile(task("(", "regex"), "a")
    assert heard == ["compiled", "refused"]


async def test_who_waits_too_long_gets_a_retry_after(tokens):
    async with open_pool(tokens, num_processes=1, max_cpu_s=WAIT_S, max_wall_s=WAIT_S, max_wait_s=0.2) as pool:
        with pytest.raises(RequestError) as caught:
            await pool.compile(hard(1), "a")
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert caught.value.retry_after_s


async def test_what_waits_is_refused_when_the_gateway_ends(tokens):
    async with open_pool(tokens, num_processes=1, max_cpu_s=WAIT_S, max_wall_s=WAIT_S) as pool:
        asked = asyncio.create_task(pool.compile(hard(1), "a"))
        await until(lambda: pool.num_waiting == 1)
        pool.refuse(RequestError(503, "gone"))
        with pytest.raises(RequestError, match="gone"):
            await asked
        with pytest.raises(RequestError, match="gone"):
            await pool.compile(easy(1), "a")
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 5
    assert pids() == set()


PROGRAM = """
import asyncio, sys
from tests.unit.service.gateway.grammars.test_pool import DEMO, GrammarPool, TokenTable, Tokenizer, hard
async def main():
    pool = GrammarPool(TokenTable.of(Tokenizer.read(DEMO), 4101, [1]), asyncio.get_running_loop().time)
    pool.start()
    await pool.wait_until_ready()
    print("ready", flush=True)
    await pool.compile(hard(1), "a")
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that compiles ends within its time alone")
def test_they_end_with_their_gateway():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout.readline() == b"ready\n"
        children = descendants_of(gateway.pid)
        assert children
        gateway.kill()
    give_up_s = time.monotonic() + WAIT_S
    while alive(children):
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def test_they_know_no_secret(tokens, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret")

    async def environ() -> bytes:
        async with open_pool(tokens, num_processes=1):
            (pid,) = pids()
            return Path(f"/proc/{pid}/environ").read_bytes()

    assert b"sk-secret" not in asyncio.run(environ())


def job(tenant: str, size: int = 1) -> queue.CompileJob:
    return queue.CompileJob(tenant, os.urandom(8), b"x" * size)


async def test_the_queue_takes_turns_and_is_bounded(monkeypatch):
    now_s = 0.0
    waiting = queue.CompileQueue(2, lambda: now_s)
    for _ in range(3):
        waiting.add(job("many"))
    waiting.add(job("few"))
    assert [waiting.next_job([]).tenant for _ in range(4)] == ["many", "few", "many", "many"]
    assert waiting.next_job([]) is None
    monkeypatch.setattr(queue, "MAX_JOBS_PER_TENANT", 2)
    monkeypatch.setattr(queue, "MAX_BYTES_PER_TENANT", 10)
    monkeypatch.setattr(queue, "MAX_BYTES", 15)
    waiting.add(job("a", 6))
    for size in (5, 11):
        with pytest.raises(RequestError) as caught:
            waiting.add(job("a", size))
        assert caught.value.status == 429
    waiting.add(job("a", 4))
    with pytest.raises(RequestError) as caught:
        waiting.add(job("a", 0))
    assert caught.value.status == 429
    with pytest.raises(RequestError) as caught:
        waiting.add(job("b", 6))
    assert caught.value.status == 503
    left = waiting.next_job([])
    waiting.put_back(left)
    assert waiting.next_job([]) is left


async def test_tenants_whose_grammars_take_long_leave_one_process_to_others():
    now_s = 0.0
    waiting = queue.CompileQueue(2, lambda: now_s)
    waiting.charge("slow", 2.0)
    waiting.charge("quick", 0.01)
    assert (waiting.is_heavy("slow"), waiting.is_heavy("quick")) == (True, False)
    running = job("slow")
    waiting.add(job("slow"))
    assert waiting.next_job([running]) is None
    waiting.add(job("quick"))
    assert waiting.next_job([running]).tenant == "quick"
    now_s = 3600.0
    assert waiting.next_job([running]).tenant == "slow"


def test_results_are_bounded_in_bytes_and_unsure_ones_in_time():
    now_s = 0.0
    results = ResultCache(lambda: now_s, max_bytes=3 * (ENTRY_BYTES + 400))
    for name in b"abcd":
        results.put(bytes([name]), Result("x" * 100))
        assert results.get(b"a") is not None or name > ord("b")
    assert sum(results.get(bytes([name])) is not None for name in b"abcd") == 3
    results.put(b"e", Result(None, "slow", is_final=False))
    assert results.get(b"e").error == "slow"
    now_s = TRANSIENT_TTL_S + 1
    assert results.get(b"e") is None
    results.put(b"f", Result("x" * 10_000))
    assert results.get(b"f") is None
