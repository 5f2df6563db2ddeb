"""A pool of processes that compile grammars with bounded time and memory, fairly between tenants.

A client's grammar is compiled here before it is compiled anywhere else.
"""

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
from service.gateway.grammars.process import GrammarProcess, ProcessEnded
from service.gateway.grammars.queue import CompileJob, CompileQueue, overloaded
from service.gateway.grammars.results import Result, ResultCache
from service.observability.logs import fields

log = logging.getLogger("quire.grammars")

PREEMPTION_CHECK_S = 0.05
RESTART_DELAYS_S = (0.0, 0.2, 1.0, 5.0)
"""Delays before restarting a process that died before it was ready."""


@dataclass(frozen=True)
class CompileLimits:
    num_processes: int = 2
    max_cpu_s: float = 2.0
    max_wall_s: float = 10.0  # a busy machine can be slow
    max_memory_bytes: int = 160 << 20  # per process, beyond an idle one's usage
    max_wait_s: float = 20.0  # before a request is refused
    long_s: float = 0.25  # CPU time after which a job may be preempted for another tenant
    start_s: float = 30.0

    @property
    def out_of_time(self) -> str:
        return f"The grammar takes more than {self.max_cpu_s:g} s to compile."

    @property
    def out_of_memory(self) -> str:
        return f"The grammar takes more than {self.max_memory_bytes >> 20} MiB to compile."


@dataclass(frozen=True)
class PackedTask:
    """An encoded task and its hash."""

    key: bytes
    data: bytes

    @classmethod
    def of(cls, task: GrammarTask) -> PackedTask:
        """Encode a task. Slow if it is large: call it off the event loop."""
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
        """`on_result` is called with each compilation's result, one of `metrics.GRAMMAR_RESULTS`."""
        self.limits = limits or CompileLimits()
        self._hello = encode_hello(Hello(tokens, self.limits.max_cpu_s, self.limits.max_memory_bytes))
        self._clock = clock
        self._on_result = on_result
        self._queue = CompileQueue(self.limits.num_processes, clock)
        self._results = ResultCache(clock)
        self._jobs: dict[tuple[str, bytes], CompileJob] = {}  # waiting or running, by (tenant, key)
        self._slots: list[_Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._refusal: RequestError | None = None

    def start(self) -> None:
        """Start the processes one after another, in the background."""
        before: asyncio.Event | None = None
        for _ in range(self.limits.num_processes):
            slot = _Slot()
            self._slots.append(slot)
            self._tasks.append(asyncio.create_task(self._keep_running(slot, before)))
            before = slot.has_started

    @property
    def num_waiting(self) -> int:
        """Number of grammars with waiting requests."""
        return sum(job.num_waiting > 0 for job in self._jobs.values())

    def refuse(self, error: RequestError) -> None:
        """Refuse all waiting and future requests with `error`."""
        self._refusal = error
        for job in self._jobs.values():
            if not job.result.done():
                job.result.set_exception(error)
                job.result.exception()  # retrieved, so that asyncio does not warn if no request waits

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_ready(self) -> int:
        return sum(slot.is_ready for slot in self._slots)

    async def wait_until_ready(self) -> None:
        """Wait for the first process. Raises StartupError."""
        try:
            async with asyncio.timeout(self.limits.start_s):
                await self._slots[0].has_started.wait()
        except TimeoutError:
            raise StartupError("the grammar processes did not start in time") from None

    async def compile(self, task: PackedTask, tenant: str) -> str:
        """Return the task's grammar, which compiles. Raises GrammarError, RequestError (429, 503)."""
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
        self._preempt_for(job)
        try:
            await self._notify()
            async with asyncio.timeout(self.limits.max_wait_s):
                return await asyncio.shield(job.result)
        except TimeoutError:
            raise overloaded() from None
        finally:
            job.num_waiting -= 1
            if job.num_waiting == 0 and not job.result.done():
                self._drop_unwanted(job)

    def _drop_unwanted(self, job: CompileJob) -> None:
        """Drop a job that no request waits for; if it runs, its result is kept."""
        self._queue.remove(job)
        if job.slot is None:
            self._jobs.pop((job.tenant, job.key), None)

    def _preempt_for(self, job: CompileJob) -> None:
        """If all processes are busy and a light tenant waits, interrupt a long job; it is restarted later."""
        if job.slot is not None or job.num_waiting == 0 or self._queue.is_heavy(job.tenant):
            return
        running = [(slot, slot.job) for slot in self._slots if slot.job is not None]
        if len(running) < len(self._slots):
            return  # a process is or will be free
        last, last_job = max(running, key=lambda pair: pair[1].started_s)
        used_s = last.used_s()
        if used_s < self.limits.long_s:
            wait_s = max(self.limits.long_s - used_s, PREEMPTION_CHECK_S)
            asyncio.get_running_loop().call_later(wait_s, self._preempt_for, job)
        else:
            self._queue.charge(last_job.tenant, used_s, is_long=True)
            last.interrupt()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _keep_running(self, slot: _Slot, before: asyncio.Event | None) -> None:
        if before is not None:
            await before.wait()
        num_failed = 0
        while True:
            await asyncio.sleep(RESTART_DELAYS_S[min(num_failed, len(RESTART_DELAYS_S) - 1)])
            try:
                await slot.start(self._hello, self.limits.start_s)
            except (ProcessEnded, OSError, TimeoutError) as error:
                num_failed += 1
                log.error("a grammar process did not start %s", fields(error=repr(error)))
                continue
            num_failed = 0
            try:
                await self._run_jobs(slot)
            finally:
                await slot.stop()

    async def _run_jobs(self, slot: _Slot) -> None:
        while True:
            async with self._changed:
                while (job := self._next_job()) is None:
                    await self._changed.wait()
                slot.job, job.slot = job, slot
            try:
                if not await self._run(slot, job):
                    return
            finally:
                slot.job = job.slot = None
                await self._notify()

    def _next_job(self) -> CompileJob | None:
        return self._queue.next_job([slot.job for slot in self._slots if slot.job is not None])

    async def _run(self, slot: _Slot, job: CompileJob) -> bool:
        """Run a job. Return whether the process can continue."""
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
        """Return the result and whether the process can continue. None: the job was interrupted and waits again."""
        try:
            async with asyncio.timeout(self.limits.max_wall_s):
                reply = await slot.process.ask(job.task)
            self._queue.charge(job.tenant, slot.used_s())
            return Result(reply.text, reply.error or ""), not reply.is_spent
        except TimeoutError:
            result = Result(None, self.limits.out_of_time, is_final=False, ending="out_of_time")
        except ProcessEnded as ended:
            # The first crash may not be the grammar's fault.
            is_crash = not (ended.was_out_of_time or ended.was_out_of_memory)
            if slot.is_interrupted or (is_crash and job.num_crashes == 0):
                job.num_crashes += is_crash and not slot.is_interrupted
                self._requeue(job)
                return None, False
            result = self._result_of(ended)
        self._queue.charge(job.tenant, self.limits.max_cpu_s, is_long=True)
        log.warning(
            "grammar process killed %s",
            fields(reason=result.error, tenant=job.tenant, bytes=len(job.task), seconds=self._clock() - job.started_s),
        )
        return result, False

    def _requeue(self, job: CompileJob) -> None:
        if job.num_waiting:
            self._queue.put_back(job)
        else:
            self._jobs.pop((job.tenant, job.key), None)

    def _result_of(self, ended: ProcessEnded) -> Result:
        if ended.was_out_of_time:
            return Result(None, self.limits.out_of_time, is_final=False, ending="out_of_time")
        if ended.was_out_of_memory:
            return Result(None, self.limits.out_of_memory, is_final=False, ending="out_of_memory")
        log.error("a grammar process crashed %s", fields(exit_status=ended.status))
        return Result(None, "The grammar crashed its compiler.", is_final=False, ending="crashed")


class _Slot:
    """A place for one process at a time."""

    def __init__(self) -> None:
        self._process: GrammarProcess | None = None
        self.job: CompileJob | None = None
        self.is_ready = False
        self.is_interrupted = False
        self.idle_cpu_s = 0.0  # the process's CPU time before its job
        self.has_started = asyncio.Event()

    @property
    def process(self) -> GrammarProcess:
        if self._process is None:
            raise RuntimeError("the slot has no process yet")
        return self._process

    async def start(self, hello: bytes, within_s: float) -> Reply:
        """Start the process. Raises ProcessEnded, OSError, TimeoutError."""
        self.is_interrupted = False
        self._process = GrammarProcess()
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
        """Return the CPU time of the current job."""
        return self.process.cpu_s() - self.idle_cpu_s

    def interrupt(self) -> None:
        self.is_interrupted = True
        self.process.kill()

    async def stop(self) -> None:
        self.is_ready = False
        self.process.kill()
        await asyncio.shield(self.process.end())
