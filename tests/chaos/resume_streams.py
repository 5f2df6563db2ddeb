"""Streams dropped at random bytes and resumed at another gateway, each compared with an undropped stream.

`python -m tests.chaos.resume_streams --times 1000` prints how many were equal byte for byte. Two gateways, one real
Redis, a scripted worker; kinds of answers in turn: choices, best_of, stop strings, log-probabilities, usage in chunks,
characters of several bytes.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, speech
from tests.support.gateway_processes import GatewayFleet, open_fleet
from tests.support.measuring import flags, fresh_redis, report

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "the and", "max_tokens": 80}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 80}
KINDS = (
    (CHAT, MESSAGES),
    (COMPLETIONS, {**PROMPT, "echo": True}),
    (COMPLETIONS, {**PROMPT, "stop": ["END", "nowhere"]}),
    (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 3}),
    (COMPLETIONS, {**PROMPT, "logprobs": 2, "n": 2}),
    (CHAT, {**MESSAGES, "n": 4, "stop": "world"}),
    (COMPLETIONS, {**PROMPT, "n": 2, "best_of": 3}),
    (CHAT, {**MESSAGES, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
)
TEXTS = ("Hello 안녕 🙂 world, one long answer END and more", "the other one", "ééé END", "another world of words")
DONE = b"data: [DONE]\n\n"
PATIENCE_S = 60.0
KEEP_ALIVE = re.compile(rb": keep-alive\n\n")


@dataclass
class Tally:
    num_identical: int = 0
    num_different: int = 0
    num_drops: int = 0
    num_bytes: int = 0


async def run(redis_url: str, folder: Path, times: int, num_at_once: int, seed: int) -> Tally:
    """Run `times` requests, each dropped at least once."""
    tally, chance = Tally(), random.Random(seed)
    seeds = [chance.getrandbits(32) for _ in range(times)]
    at_once = asyncio.Semaphore(num_at_once)
    async with open_fleet(redis_url, folder, 2, max_connections_per_client=4096) as fleet:
        fleet.worker.script = lambda job: _script(fleet, job)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def one(number: int) -> None:
                async with at_once, asyncio.timeout(PATIENCE_S):
                    await _compare(fleet, http, KINDS[number % len(KINDS)], random.Random(seeds[number]), tally)

            await asyncio.gather(*(one(number) for number in range(times)))
    return tally


def _script(fleet: GatewayFleet, job) -> Script:
    branches = [speech(fleet.model, text).steps for text in TEXTS[: job.sampling.best_of]]
    return Script(branches=branches, choices=(2, 0) if job.sampling.best_of > job.sampling.n else (), step_s=0.004)


async def _compare(fleet: GatewayFleet, http: aiohttp.ClientSession, kind, chance: random.Random, tally: Tally) -> None:
    path, body = kind
    urls = list(fleet.urls)
    chance.shuffle(urls)
    response = await http.post(urls[0] + path, json={**body, "stream": True, "resumable": True})
    response.raise_for_status()
    request_id = response.headers["X-Request-Id"]
    undropped = asyncio.create_task(_read_all(http, f"{urls[0]}/v1/requests/{request_id}?stream=true"))
    received = b""
    while True:
        data, is_whole = await _read_some(response, chance.randrange(1, 4000))
        received += data
        if is_whole:
            break
        tally.num_drops += 1
        received, after = _whole_events(received)
        urls.reverse()
        headers = {"Last-Event-ID": str(after)}
        response = await http.get(f"{urls[0]}/v1/requests/{request_id}", headers=headers)
        response.raise_for_status()
    whole = await undropped
    tally.num_bytes += len(whole)
    if KEEP_ALIVE.sub(b"", received) == KEEP_ALIVE.sub(b"", whole) and whole.endswith(DONE):
        tally.num_identical += 1
    else:
        tally.num_different += 1


async def _read_some(response: aiohttp.ClientResponse, most_bytes: int) -> tuple[bytes, bool]:
    """Read up to this many bytes and drop the connection; return what was read, and whether it was the whole rest."""
    found = b""
    async for data in response.content.iter_any():
        found += data
        if found.endswith(DONE):
            response.release()
            return found, True
        if len(found) >= most_bytes:
            break
    response.close()
    return found[:most_bytes], False


async def _read_all(http: aiohttp.ClientSession, url: str) -> bytes:
    async with http.get(url) as response:
        response.raise_for_status()
        return await response.read()


def _whole_events(data: bytes) -> tuple[bytes, int]:
    """Return a cut stream's complete events, and the number of the last."""
    kept = data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""
    ids = re.findall(rb"^id: (\d+)$", kept, re.MULTILINE)
    return kept, int(ids[-1]) if ids else 0


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with fresh_redis() as (url, folder):
        start_s = time.monotonic()
        tally = asyncio.run(run(url, folder / "model", args.times, args.at_once, args.seed))
        elapsed_s = time.monotonic() - start_s
    report({**vars(tally), "times": args.times, "elapsed_s": round(elapsed_s, 1)}, args.out)
    return int(tally.num_identical != args.times)


if __name__ == "__main__":
    sys.exit(main())
