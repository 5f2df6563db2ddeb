"""`quire dead`: list, show and requeue dead letters (jobs that killed engines)."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import datetime

from service.cli.table import print_grid, print_table
from service.errors import StartupError
from service.queue.codec import decode, unpack_ids
from service.queue.interface import QueueUnavailable
from service.queue.messages import DeadLetter, Job
from service.queue.redis.connect import TIMEOUT_S
from service.queue.redis.dead_letters import RedisDeadLetters
from service.queue.redis.link import RedisLink

MAX_IDS_SHOWN = 64
MAX_CAUSE_SHOWN = 80


def add_dead_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        metavar="list|show|requeue",
        choices=("list", "show", "requeue"),
        help="list all, show one, or requeue one as a copy that runs alone",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="id of the job, for show and requeue")
    parser.add_argument("--redis-url", metavar="URL", help="the queue's Redis (default: $QUIRE_REDIS_URL)")


def run_dead(flags: argparse.Namespace) -> int:
    """Return 0, or 1 for an unknown job."""
    url = flags.redis_url or os.environ.get("QUIRE_REDIS_URL")
    if not url:
        raise StartupError("--redis-url: missing")
    if flags.action != "list" and flags.job is None:
        raise StartupError(f"{flags.action}: the id of a job is missing")
    if flags.action == "list" and flags.job is not None:
        raise StartupError(f"{flags.job}: list takes no job (show {flags.job})")
    return asyncio.run(_run(flags, url))


async def _run(flags: argparse.Namespace, url: str) -> int:
    link = RedisLink(url, TIMEOUT_S)
    try:
        await link.check()
        dead = RedisDeadLetters(link)
        if flags.action == "list":
            return _list(await dead.letters())
        if flags.action == "show":
            return _show(flags.job, await dead.find(flags.job))
        copy = await dead.requeue(flags.job)
        if copy is None:
            return _unknown_job(flags.job)
        print(copy)
        return 0
    except QueueUnavailable as error:
        raise StartupError(f"--redis-url: {error}") from None
    finally:
        await link.close()


def _list(letters: Sequence[DeadLetter]) -> int:
    rows = [
        (letter.job_id, _shown_time(letter), str(letter.deaths), _one_line(letter.cause)[:MAX_CAUSE_SHOWN])
        for letter in letters
    ]
    print_grid(("job", "dead since", "deaths", "cause"), rows)
    return 0


def _show(job_id: str, letter: DeadLetter | None) -> int:
    if letter is None:
        return _unknown_job(job_id)
    job = decode(Job, letter.job)
    prompt = unpack_ids(job.prompt)
    rest = f" ... {len(prompt)} in total" if len(prompt) > MAX_IDS_SHOWN else ""
    rows = [
        ("job", letter.job_id),
        ("tenant", job.tenant),
        ("dead since", _shown_time(letter)),
        ("engine deaths", str(letter.deaths)),
        ("cause", _one_line(letter.cause)),
        ("sampling", str(job.sampling)),
        ("prompt", " ".join(map(str, prompt[:MAX_IDS_SHOWN])) + rest),
    ]
    print_table(rows)
    return 0


def _shown_time(letter: DeadLetter) -> str:
    return datetime.fromtimestamp(letter.buried_at_s).isoformat(sep=" ", timespec="seconds")


def _one_line(text: str) -> str:
    """Replace control characters: a cause may quote a client's text."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _unknown_job(job_id: str) -> int:
    print(f"quire dead: {job_id}: no dead letter of this job", file=sys.stderr)
    return 1
