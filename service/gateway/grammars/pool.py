"""The processes that compile grammars, and who waits for them. Nothing that a client sends is compiled anywhere else
before it has been here: each grammar has bounded time and memory, and costs its own tenant."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from model.errors import GrammarError
from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import GrammarTask
from service.errors import RequestError, StartupError
from service.gateway.grammars.messages import Hello, Reply, encode_hello, encode_task
from service.gateway.grammars.process import Ended, GrammarProcess
from service.gateway.grammars.queue import CompileJob, CompileQueue, overloaded
from service.gateway.grammars.results import Result, Results
from service.observability.logs import fields

log = logging.getLogger("quire.grammars")

LOOK_AGAIN_S = 0.05
START_AGAIN_S = (0.0, 0.2, 1.0, 5.0)
"""Before the next start of a process that ended before it was ready."""


@dataclass(frozen=True)
class CompileLimits:
    num_processes: int = 2
    max_cpu_s: float = 2.0
    max_wall_s: float = 10.0  # on a machine that is busy otherwise
    max_memory_bytes: int = 160 << 20  # of each process, on top of what it takes when it is idle
    max_wait_s: float = 20.0  # before a request is told to come again
    long_s: float = 0.25  # of CPU time: a job that has had so much gives way
    start_s: float = 30.0

    @property
    def out_of_time(self) -> str:
        return f"The grammar takes more than {self.max_cpu_s:g} s to compile."

    @property
    def out_of_memory(self) -> str:
        return f"The grammar takes more than {self.max_memory_bytes >> 20} MiB to compile."


@dataclass(frozen=True)
class PackedTask:
    """A task as `GrammarPool.compile` takes it."""

    key: bytes
    data: bytes

    @classmethod
    def of(cls, task: GrammarTask) -> PackedTask:
        """Takes long for a large one: call it off the event loop."""
        data = encode_task(task)
        return cls(hashlib.sha256(data).digest(), data)


class GrammarPool:
    def __init__(
        self,
        tokens: TokenTable,
        clock: Callable[[], float],
        limits: CompileLimits | None = None,
        on_result: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """`on_result` is called with the result of each compilation, one of `metrics.GRAMMAR_RESULTS`."""
        self.limits = limits or CompileLimits()
        self._hello = encode_hello(Hello(tokens, self.limits.max_cpu_s, self.limits.max_memory_bytes))
        self._clock = clock
        self._on_result = on_result
        self._queue = CompileQueue(self.limits.num_processes, clock)
        self._results = Results(clock)
        self._jobs: dict[tuple[str, bytes], CompileJob] = {}  # that wait or run, by tenant and key
        self._slots: list[_Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Condition()
        self._refusal: RequestError | None = None

    def start(self) -> None:
        """The processes start one after another, in the background."""
        before: asyncio.Event | None = None
        for _ in range(self.limits.num_processes):
            slot = _Slot()
            self._slots.append(slot)
            self._tasks.append(asyncio.create_task(self._keep(slot, before)))
            before = slot.has_started

    @property
    def num_waiting(self) -> int:
        """Grammars that requests wait for."""
        return sum(job.num_waiting > 0 for job in self._jobs.values())

    def refuse(self, error: RequestError) -> None:
        """What waits, and whatever else is asked for, is refused with this."""
        self._refusal = error
        for job in self._jobs.values():
            if not job.result.done():
                job.result.set_exception(error)
                job.result.exception()  # retrieved, so that asyncio does not warn when no request waits

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_ready(self) -> int:
        """Processes that compile, or would at once."""
        return sum(slot.is_ready for slot in self._slots)

    async def wait_until_ready(self) -> None:
        """Until a first process is. Raises StartupError."""
        try:
            async with asyncio.timeout(self.limits.start_s):
                await self._slots[0].has_started.wait()
        except TimeoutError:
            raise StartupError("the processes that compile grammars do not start") from None

    async def compile(self, task: PackedTask, tenant: str) -> str:
        """The text of the task's grammar, proven to compile. Raises GrammarError, and RequestError (429, 503) where too
        many wait."""
        if self._refusal is not None:
            raise self._refusal
        result = self._results.get(task.key) or await self._compiled(task, tenant)
        if result.text is None:
            raise GrammarError(result.error)
        return result.text

    async def _compiled(self, task: PackedTask, tenant: str) -> Result:
        job = self._jobs.get((tenant, task.key))
        if job is None:
            job = CompileJob(tenant, task.key, task.data)
            self._queue.add(job)
            self._jobs[tenant, task.key] = job
        job.num_waiting += 1
        self._make_way(job)
        try:
            await self._tell()
            async with asyncio.timeout(self.limits.max_wait_s):
                return await asyncio.shield(job.result)
        except TimeoutError:
            raise overloaded() from None
        finally:
            job.num_waiting -= 1
            if job.num_waiting == 0 and not job.result.done():
                self._leave(job)

    def _leave(self, job: CompileJob) -> None:
        """Drop a job that no request waits for. A running one goes on, and its result is kept."""
        self._queue.remove(job)
        if job.slot is None:
            self._jobs.pop((job.tenant, job.key), None)

    def _make_way(self, job: CompileJob) -> None:
        """Not all processes stay with long jobs while a tenant waits that has not had any: one of them is begun again
        later."""
        if job.slot is not None or job.num_waiting == 0 or self._queue.is_heavy(job.tenant):
            return
        running = [slot for slot in self._slots if slot.job is not None]
        if len(running) < len(self._slots):
            return  # one is free, or about to be
        last = max(running, key=lambda slot: slot.job.started_s)
        used_s = last.used_s()
        if used_s < self.limits.long_s:
            wait_s = max(self.limits.long_s - used_s, LOOK_AGAIN_S)
            asyncio.get_running_loop().call_later(wait_s, self._make_way, job)
        else:
            self._queue.charge(last.job.tenant, used_s, is_long=True)
            last.interrupt()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _keep(self, slot: _Slot, before: asyncio.Event | None) -> None:
        """One process at a time, the next when it has ended."""
        if before is not None:
            await before.wait()
        num_failed = 0
        while True:
            await asyncio.sleep(START_AGAIN_S[min(num_failed, len(START_AGAIN_S) - 1)])
            try:
                await slot.start(self._hello, self.limits.start_s)
            except (Ended, OSError, TimeoutError) as error:
                num_failed += 1
                log.error("a grammar process did not start %s", fields(error=repr(error)))
                continue
            num_failed = 0
            try:
                await self._work(slot)
            finally:
                await slot.stop()

    async def _work(self, slot: _Slot) -> None:
        """Until its process has ended, or has to."""
        while True:
            async with self._news:
                while (job := self._take()) is None:
                    await self._news.wait()
                slot.job, job.slot = job, slot
            try:
                if not await self._run(slot, job):
                    return
            finally:
                slot.job = job.slot = None
                await self._tell()

    def _take(self) -> CompileJob | None:
        return self._queue.take([slot.job for slot in self._slots if slot.job is not None])

    async def _run(self, slot: _Slot, job: CompileJob) -> bool:
        """Whether the process can go on."""
        job.started_s = self._clock()
        slot.idle_cpu_s = slot.process.cpu_s()
        result, goes_on = self._results.get(job.key), True
        if result is None:
            result, goes_on = await self._ask(slot, job)
            if result is None:
                return False
            self._on_result(result.kind)
            self._results.put(job.key, result)
        self._jobs.pop((job.tenant, job.key), None)
        if not job.result.done():
            job.result.set_result(result)
        return goes_on

    async def _ask(self, slot: _Slot, job: CompileJob) -> tuple[Result | None, bool]:
        """What became of the job, None where it was interrupted and waits again; whether the process can go on."""
        try:
            async with asyncio.timeout(self.limits.max_wall_s):
                reply = await slot.process.ask(job.task)
            self._queue.charge(job.tenant, slot.used_s())
            return Result(reply.text, reply.error or ""), not reply.is_spent
        except TimeoutError:
            result = Result(None, self.limits.out_of_time, is_sure=False, ending="out_of_time")
        except Ended as ended:
            # A process may have ended by itself before it was asked: a first crash says nothing of the grammar.
            is_crash = not (ended.was_out_of_time or ended.was_out_of_memory)
            if slot.is_interrupted or (is_crash and job.num_crashes == 0):
                job.num_crashes += is_crash and not slot.is_interrupted
                self._wait_again(job)
                return None, False
            result = self._result_of(ended)
        self._queue.charge(job.tenant, self.limits.max_cpu_s, is_long=True)
        log.warning(
            "a grammar ended its process %s",
            fields(reason=result.error, tenant=job.tenant, bytes=len(job.task), seconds=self._clock() - job.started_s),
        )
        return result, False

    def _wait_again(self, job: CompileJob) -> None:
        if job.num_waiting:
            self._queue.put_back(job)
        else:
            self._jobs.pop((job.tenant, job.key), None)

    def _result_of(self, ended: Ended) -> Result:
        if ended.was_out_of_time:
            return Result(None, self.limits.out_of_time, is_sure=False, ending="out_of_time")
        if ended.was_out_of_memory:
            return Result(None, self.limits.out_of_memory, is_sure=False, ending="out_of_memory")
        log.error("a grammar process crashed %s", fields(exit_status=ended.status))
        return Result(None, "The grammar is more than its compiler can take.", is_sure=False, ending="crashed")


class _Slot:
    """The place of one process."""

    def __init__(self) -> None:
        self.process: GrammarProcess | None = None
        self.job: CompileJob | None = None
        self.is_ready = False
        self.is_interrupted = False
        self.idle_cpu_s = 0.0  # what the process had used before its job
        self.has_started = asyncio.Event()

    async def start(self, hello: bytes, within_s: float) -> Reply:
        """Raises Ended, OSError, TimeoutError."""
        self.is_interrupted = False
        self.process = GrammarProcess()
        try:
            async with asyncio.timeout(within_s):
                reply = await self.process.ask(hello)
        except BaseException:
            await self.stop()
            raise
        self.is_ready = True
        self.has_started.set()
        return reply

    def used_s(self) -> float:
        """CPU time that its job has had."""
        return self.process.cpu_s() - self.idle_cpu_s

    def interrupt(self) -> None:
        self.is_interrupted = True
        self.process.kill()

    async def stop(self) -> None:
        self.is_ready = False
        self.process.kill()
        await asyncio.shield(self.process.end())
