"""A Redis and workers with the demo model, as processes, for tests that kill them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis import Redis

from service.queue.embedded.redis import EmbeddedRedis
from tests.support.queue_pair import QueuePair, open_pair
from tests.support.served import REPOSITORY

PROGRAM = REPOSITORY / "tests" / "support" / "chaos_worker.py"
START_WITHIN_S = 90.0

IS_FP8 = os.environ.get("CHAOS_FP8", "") != ""
"""True: workers have fp8 weights and an fp8 cache, and compute with RowwiseOps."""

HAS_ADAPTERS = os.environ.get("CHAOS_LORA", "") != ""
"""True: two of three jobs have an adapter (chaos_adapters.py), and workers one slot."""

LORA_FLAGS = ("--enable-lora", "--max-lora-rank=16") if HAS_ADAPTERS else ()
HAS_RANKS = os.environ.get("CHAOS_RANKS", "") != ""
"""True: workers have one and two ranks in turn, and resume each other's jobs."""

FP8_FLAGS = ("--quantization=fp8", "--kv-cache-dtype=fp8") if IS_FP8 else ()


class Worker:
    """One worker process. It logs to a file: a pipe that is not read would block it."""

    def __init__(self, fleet: Fleet, name: str, step_s: float):
        self.name = name
        self._log = fleet.folder / f"{name}.log"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
        environ |= {"PYTHONPATH": str(REPOSITORY), "CHAOS_STEP_S": str(step_s), "OPENBLAS_NUM_THREADS": "1"}
        flags = (f"--redis-url={fleet.redis_url}", f"--lease={fleet.lease_s}", f"--worker-name={name}", "--device=cpu")
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(PROGRAM),
                    str(fleet.orders),
                    "worker",
                    "--num-gpu-blocks=2048",
                    *flags,
                    *FP8_FLAGS,
                    *LORA_FLAGS,
                    *fleet.flags,
                    *fleet.next_drafting_flags(),
                    *fleet.next_rank_flags(),
                ],
                cwd=REPOSITORY,
                env={
                    **environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "CHAOS_STEP_S": str(step_s),
                    "OPENBLAS_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_ready(self) -> bool:
        return "\nready\n" in self.output

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, within_s: float = 60.0) -> int:
        """Send the signal; return the exit status."""
        if self.is_alive:
            self.send(number)
        return self.process.wait(within_s)


class Fleet:
    """Redis and workers; workers read their orders in the folder `orders`."""

    def __init__(self, folder: Path, lease_s: float = 2.0, flags: tuple[str, ...] = ()):
        self.folder, self.lease_s, self.flags = folder, lease_s, flags
        self.orders = folder / "orders"
        self.orders.mkdir()
        self.redis = EmbeddedRedis.start(folder / "redis")
        self.redis_url = self.redis.url
        self.workers: list[Worker] = []
        self.drafting: tuple[str, ...] = ()
        """Values of --speculative-config for new workers, in turn."""
        self._num_started = self._num_before_order = 0

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def client(self) -> Redis:
        return Redis.from_url(self.redis_url)

    async def gateway(self) -> QueuePair:
        return await open_pair(self.redis_url)

    def next_drafting_flags(self) -> tuple[str, ...]:
        if not self.drafting:
            return ()
        return (f"--speculative-config={self.drafting[self._num_started % len(self.drafting)]}",)

    def next_rank_flags(self) -> tuple[str, ...]:
        return (f"--tensor-parallel-size={self._num_started % 2 + 1}",) if HAS_RANKS else ()

    def start(self, step_s: float = 0.01) -> Worker:
        self._num_started += 1
        self.workers.append(Worker(self, f"worker{self._num_started}", step_s))
        return self.workers[-1]

    async def have(self, num_workers: int, step_s: float = 0.01) -> list[Worker]:
        """Start workers until `num_workers` are alive; wait until all are ready."""
        while len(self.living) < num_workers:
            self.start(step_s)
        give_up_s = time.monotonic() + START_WITHIN_S
        while not all(worker.is_ready for worker in self.living):
            assert time.monotonic() < give_up_s, self.output
            await asyncio.sleep(0.05)
        assert len(self.living) >= num_workers, self.output
        return self.living

    @asynccontextmanager
    async def kept(self, num_workers: int, step_s: float = 0.01) -> AsyncIterator[None]:
        """While inside, replace each ended worker, as a supervisor would."""
        await self.have(num_workers, step_s)

        async def supervise() -> None:
            while True:
                while len(self.living) < num_workers:
                    self.start(step_s)
                await asyncio.sleep(0.1)

        task = asyncio.create_task(supervise())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    @property
    def num_dead(self) -> int:
        return len(self.workers) - len(self.living)

    def order(self, name: str) -> None:
        self._num_before_order = len(self.living)
        (self.orders / name).touch()

    async def obeyed(self, name: str, within_s: float = 30.0) -> float:
        """Wait until a worker has carried out the order and is dead; return that monotonic time."""
        give_up_s = time.monotonic() + within_s
        while (self.orders / name).exists() or len(self.living) == self._num_before_order:
            assert time.monotonic() < give_up_s, f"{name} was not obeyed:\n{self.output}"
            await asyncio.sleep(0.002)
        return time.monotonic()

    def kill_redis(self) -> None:
        """Kill Redis with SIGKILL; writes since its last fsync, up to a second, may be lost."""
        os.kill(self.redis.pid, signal.SIGKILL)
        self.redis.stop()

    def start_redis(self) -> None:
        """Start Redis again at the same URL."""
        self.redis = EmbeddedRedis.start(self.folder / "redis")
        assert self.redis.url == self.redis_url

    @property
    def output(self) -> str:
        return "\n".join(f"--- {worker.name}\n{worker.output}" for worker in self.workers)

    def close(self) -> None:
        for worker in self.living:
            worker.send(signal.SIGCONT)
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
        self.redis.stop()
