"""Spread of requests over the workers of one `quire serve`, and share of prompt tokens found cached.

`python -m tests.bench.spread --workers 2` serves the demo model on the CPU: a burst of 64 requests, an open loop of 100
at 20 a second, and 12 chats of five turns.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import urllib.request
from pathlib import Path

import aiohttp

from tests.support.measuring import flags, report
from tests.support.served import Served

CARD_S = 1.3
"""Cards, from which the counters come, are written once a second."""
CHAT = "The fox met the hen by the old mill and they talked. " * 8


def by_worker(url: str, name: str) -> list[float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = re.findall(rf'(?m)^{name}{{engine="(?!gateway)([^"]*)"[^}}]*}} (\S+)$', text)
    return [float(value) for _, value in sorted(found)]


class Loads:
    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url, self._client = url, client
        self._random = random.Random(1)

    async def burst(self) -> None:
        await asyncio.gather(*(self._ask(f"Story {number} of a fox", 40) for number in range(64)))

    async def open_loop(self) -> None:
        async def later(number: int) -> None:
            await asyncio.sleep(0.05 * number)
            await self._ask(f"Tale {number} of a hen", 40)

        await asyncio.gather(*map(later, range(100)))

    async def chats(self) -> None:
        async def chat(number: int) -> None:
            prompt = f"Chat {number}. {CHAT}"
            for _ in range(5):
                await asyncio.sleep(self._random.random())
                prompt += await self._ask(prompt, 24) + " And then? "

        await asyncio.gather(*map(chat, range(12)))

    async def _ask(self, prompt: str, num_tokens: int) -> str:
        body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        async with self._client.post(f"{self._url}/v1/completions", json=body) as response:
            return (await response.json())["choices"][0]["text"]


async def measure(url: str) -> dict[str, object]:
    names = ("vllm:generation_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    figures: dict[str, object] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        loads = Loads(url, client)
        before = [by_worker(url, name) for name in names]
        for name, load in (("burst", loads.burst), ("open loop", loads.open_loop), ("chats", loads.chats)):
            await load()
            await asyncio.sleep(CARD_S)
            after = [by_worker(url, name) for name in names]
            tokens, queries, hits = (
                [int(new - old) for old, new in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
            )
            figures[name] = {"tokens": tokens, "hit_share": round(sum(hits) / sum(queries), 3)}
            before = after
    return figures


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), f"--data-parallel-size={given.workers}")
        try:
            report({"workers": given.workers, **asyncio.run(measure(served.url))}, given.out)
        finally:
            served.terminate()


if __name__ == "__main__":
    main()
