"""`quire bench queue`: token events through one Redis, with gateways and workers but no model."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from redis.asyncio import Redis

from service.bench.flag_values import whole_number
from service.bench.report import Figure, python_script, script_environment, write_report
from service.cli.table import print_grid, shown
from service.config.settings import Settings
from service.errors import StartupError
from service.queue.embedded.die_with_parent import die_with_parent
from service.queue.embedded.redis import EmbeddedRedis
from service.queue.interface import QueueUnavailable
from service.queue.redis.connect import TIMEOUT_S
from service.queue.redis.link import RedisLink


def add_queue_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", metavar="N", default="1024", help="open jobs (default: %(default)s)")
    parser.add_argument("--tokens", metavar="N", default="200", help="tokens per job (default: %(default)s)")
    parser.add_argument("--workers", metavar="N", default="1", help="worker processes (default: %(default)s)")
    parser.add_argument("--doors", metavar="N", default="1", help="gateway processes (default: %(default)s)")
    parser.add_argument("--batch", metavar="N", default="256", help="jobs per step (default: %(default)s)")
    parser.add_argument("--redis-url", metavar="URL", help="an unused Redis (default: start one)")


@dataclass(frozen=True)
class QueueWork:
    """Work of a run: each worker publishes one token for each of its jobs per step, at full speed."""

    num_jobs: int
    num_tokens: int
    num_workers: int
    num_doors: int
    num_in_step: int

    @property
    def num_events(self) -> int:
        return self.num_jobs * self.num_tokens


@dataclass(frozen=True)
class QueueFigures:
    """Figures of a run. CPU seconds are the processes' own, so a busy machine changes the rate, not the cost."""

    num_events: int
    wall_s: float
    redis_cpu_s: float
    workers_cpu_s: float
    doors_cpu_s: float

    @property
    def by_part(self) -> dict[str, float]:
        return {"redis": self.redis_cpu_s, "workers": self.workers_cpu_s, "doors": self.doors_cpu_s}

    def us_an_event(self, cpu_s: float) -> float:
        return 1e6 * cpu_s / self.num_events

    def per_core(self, cpu_s: float) -> float:
        return self.num_events / cpu_s


def run_queue_bench(settings: Settings, flags: argparse.Namespace) -> int:
    """Run the bench. Return 0. Raises StartupError."""
    names = ("jobs", "tokens", "workers", "doors", "batch")
    work = QueueWork(*(whole_number(f"--{name}", getattr(flags, name)) for name in names))
    with tempfile.TemporaryDirectory() as folder:
        server = None if flags.redis_url else EmbeddedRedis.start(Path(folder))
        try:
            url = server.url if server is not None else flags.redis_url
            asyncio.run(_check(url))
            figures = asyncio.run(_measure(url, work))
        finally:
            if server is not None:
                server.stop()
    _print(figures)
    write_report(flags, {"bench": "queue", "work": asdict(work), "figures": asdict(figures)}, _figure(figures))
    return 0


async def _check(url: str) -> None:
    link = RedisLink(url, TIMEOUT_S)
    try:
        await link.check()
    except QueueUnavailable as error:
        raise StartupError(f"--redis-url: {error}") from None
    finally:
        await link.close()


async def _measure(url: str, work: QueueWork) -> QueueFigures:
    roles = [("gateway", number) for number in range(work.num_doors)]
    roles += [("worker", number) for number in range(work.num_workers)]
    redis = Redis.from_url(url)
    processes = [_start(url, work, role, number) for role, number in roles]
    try:
        for process in processes:
            _read(process, "ready")
        before_s, started_s = await _redis_cpu_s(redis), time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        cpu_s = [await asyncio.to_thread(_read, process, "cpu") for process in processes]
        wall_s, redis_s = time.monotonic() - started_s, await _redis_cpu_s(redis) - before_s
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        await redis.aclose()
    doors_s, workers_s = sum(cpu_s[: work.num_doors]), sum(cpu_s[work.num_doors :])
    return QueueFigures(work.num_events, wall_s, redis_s, workers_s, doors_s)


def _start(url: str, work: QueueWork, role: str, number: int) -> subprocess.Popen[str]:
    words = (role, str(number), url, *(str(value) for value in asdict(work).values()))
    return subprocess.Popen(
        python_script("queue_process", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=script_environment(),
        start_new_session=True,  # Ctrl-C is handled here
        preexec_fn=die_with_parent,
    )


def _read(process: subprocess.Popen[str], word: str) -> float:
    """Return the number after `word` in the process's next line. Raises StartupError for any other line."""
    assert process.stdout is not None
    found, _, value = process.stdout.readline().strip().partition(" ")
    if found != word:
        raise StartupError(f"queue: a process of the bench failed (exit status {process.poll()})")
    return float(value or 0)


async def _redis_cpu_s(redis: Redis) -> float:
    used = await redis.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def _print(figures: QueueFigures) -> None:
    rows = [
        (name, shown(cpu_s), shown(figures.us_an_event(cpu_s)), shown(figures.per_core(cpu_s)))
        for name, cpu_s in figures.by_part.items()
    ]
    print(
        f"{figures.num_events:,} token events in {figures.wall_s:.2f} s: {figures.num_events / figures.wall_s:,.0f}/s"
    )
    print_grid(("part", "CPU s", "us an event", "events/s a core"), rows)


def _figure(figures: QueueFigures) -> Figure:
    costs = [figures.us_an_event(cpu_s) for cpu_s in figures.by_part.values()]
    bars = {"label": "CPU time", "x": list(figures.by_part), "y": costs}
    panel = {"kind": "bars", "title": "CPU time", "x": "us a token event", "y": "", "series": [bars]}
    rate = f"{figures.num_events / figures.wall_s:,.0f} a second"
    return {"title": f"{figures.num_events:,} token events, {rate}", "panels": [panel]}
