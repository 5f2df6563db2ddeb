"""`quire top`: live view of a service's /metrics."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from service.cli.client.api import ServiceError, add_client_flags, connected
from service.observability.metrics import (
    FIRST_TOKEN_S,
    GATEWAY,
    NEXT_TOKEN_S,
    OPEN_REQUESTS,
    QUEUE_DEPTH,
    QUEUE_OLDEST_WAIT_S,
    REQUESTS_ENDED,
)
from service.observability.worker_metrics import (
    GENERATION_TOKENS,
    KV_BLOCKS,
    KV_WASTE_RATIO,
    NUM_RUNNING,
    NUM_WAITING,
    PREEMPTIONS,
    PROMPT_TOKENS,
    STEP_TIME_MS,
    STEPS,
)

TOTAL = "_total"
"""Suffix of counter names in the exposition."""

CLEAR = "\x1b[H\x1b[J"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
BLOCK_STATES = {"used": "█", "shared": "▓", "cached": "▒", "free": "░"}
PERCENTILES = (50, 90, 99)


def add_top_flags(parser: argparse.ArgumentParser) -> None:
    add_client_flags(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one update and quit (default: until Ctrl-C)")


def run_top(flags: argparse.Namespace) -> int:
    """Return 0 after Ctrl-C, 1 if the service cannot be reached."""
    if not 0.1 <= flags.every <= 60:
        print(f"quire top: --every: {flags.every:g} is out of range (0.1..60)", file=sys.stderr)
        return 2
    try:
        asyncio.run(_watch(flags))
    except ServiceError as error:
        print(f"quire top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="", flush=True)
    return 0


async def _watch(flags: argparse.Namespace) -> None:
    live = sys.stdout.isatty() and not flags.once
    async with connected(flags) as client:
        before = Scrape.read(await client.metrics())
        while True:
            await asyncio.sleep(flags.every)
            now = Scrape.read(await client.metrics())
            width = shutil.get_terminal_size().columns
            view = "\n".join(line[:width] for line in render(before, now, width))
            print((HIDE_CURSOR + CLEAR if live else "") + view, flush=True)
            if flags.once:
                return
            before = now


@dataclass(frozen=True)
class Scrape:
    """Samples of one scrape, by name and labels."""

    at_s: float
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def read(cls, exposition: str) -> Scrape:
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(exposition)
            for sample in family.samples
        }
        return cls(time.monotonic(), samples)

    def each(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of matching samples."""
        for (found, pairs), value in self.samples.items():
            if found == name and labels.items() <= pairs:
                yield dict(pairs), value

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.each(name, **labels))


def render(before: Scrape, now: Scrape, width: int) -> Iterator[str]:
    """Yield the lines of the view: the gateway, then a paragraph per worker."""
    span_s = max(now.at_s - before.at_s, 1e-6)

    def rate(name: str, **labels: str) -> float:
        return max(0.0, now.sum(name, **labels) - before.sum(name, **labels)) / span_s

    yield (
        f"requests  {now.sum(OPEN_REQUESTS):.0f} open   {now.sum(QUEUE_DEPTH):.0f} queued, "
        f"for {max((value for _, value in now.each(QUEUE_OLDEST_WAIT_S)), default=0.0):.1f} s at most   "
        f"{rate(REQUESTS_ENDED + TOTAL):.1f} ended/s"
    )
    for name, title in ((FIRST_TOKEN_S, "TTFT"), (NEXT_TOKEN_S, "gap")):
        yield f"{title:<9} {_percentiles(before, now, name)}"
    for worker in sorted({labels["engine"] for labels, _ in now.each(STEPS + TOTAL)} - {GATEWAY}):
        yield ""
        yield f"worker    {worker}"
        yield (
            f"          {now.sum(NUM_RUNNING, engine=worker):.0f} running   "
            f"{now.sum(NUM_WAITING, engine=worker):.0f} waiting   "
            f"{rate(STEPS + TOTAL, engine=worker):.0f} steps/s   "
            f"{now.sum(STEP_TIME_MS, engine=worker):.1f} ms a step"
        )
        yield (
            f"tokens/s  {rate(GENERATION_TOKENS + TOTAL, engine=worker):,.0f} generated   "
            f"{rate(PROMPT_TOKENS + TOTAL, engine=worker):,.0f} of prompts   "
            f"{now.sum(PREEMPTIONS + TOTAL, engine=worker):.0f} preemptions"
        )
        yield from _blocks(now, worker, width)


def _percentiles(before: Scrape, now: Scrape, name: str) -> str:
    """Return the percentiles between two scrapes, as upper bucket bounds."""
    counts: dict[float, float] = {}
    for scrape, sign in ((now, 1), (before, -1)):
        for labels, value in scrape.each(name + "_bucket"):
            bound = float(labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sign * value
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return "-"
    found = [
        next(bound for bound, count in sorted(counts.items()) if count >= total * share / 100) for share in PERCENTILES
    ]
    return "   ".join(f"p{share} <= {1e3 * bound:,.0f} ms" for share, bound in zip(PERCENTILES, found, strict=True))


def _blocks(now: Scrape, worker: str, width: int) -> Iterator[str]:
    tiers: dict[str, dict[str, float]] = {}
    for labels, value in now.each(KV_BLOCKS, engine=worker):
        tiers.setdefault(labels["tier"], {})[labels["state"]] = value
    for tier, states in sorted(tiers.items()):
        total = sum(states.values())
        if total:
            bar_width = max(10, min(width, 100) - 10)
            bar = "".join(
                sign * round(bar_width * states.get(state, 0) / total) for state, sign in BLOCK_STATES.items()
            )
            yield f"KV {tier:<6} {bar}"
            counts = [f"{sign} {states[state]:,.0f} {state}" for state, sign in BLOCK_STATES.items() if state in states]
            yield f"          {'   '.join(counts)}   waste {100 * now.sum(KV_WASTE_RATIO, engine=worker):.1f} %"
