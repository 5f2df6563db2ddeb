"""SIGKILL of one of two workers under 64 streams, each compared with the same stream undisturbed.

    python -m tests.chaos.kill_group --device cuda --ranks 2

Two workers of one `quire serve` with the demo model in float32, of two ranks each, on the same two GPUs if there are
not four. The worker dies once half of the streams have begun; the other one resumes its requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from tests.support.measuring import flags, report
from tests.support.served import Served

NUM_STREAMS, NUM_TOKENS = 64, 400
BODY = {"model": "demo", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
WAIT_S = 100.0


@dataclass
class Stream:
    text: str = ""
    num_chunks: int = 0
    last_s: float = 0.0
    longest_gap_s: float = 0.0

    def add(self, text: str) -> None:
        now_s = time.monotonic()
        if self.num_chunks:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.text, self.num_chunks, self.last_s = self.text + text, self.num_chunks + 1, now_s


async def stream_all(url: str, victim: int | None) -> list[Stream]:
    """Read all streams at once; kill the process `victim` once half have begun."""
    streams = [Stream() for _ in range(NUM_STREAMS)]

    async def read(client: aiohttp.ClientSession, number: int) -> None:
        nonlocal victim
        how = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
        body = {**BODY, **how, "prompt": f"Once upon a time there were {number} foxes"}
        async with client.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                streams[number].add(json.loads(line[6:])["choices"][0]["text"])
                begun = sum(stream.num_chunks > NUM_TOKENS // 8 for stream in streams)
                if victim is not None and begun >= NUM_STREAMS // 2:
                    os.kill(victim, signal.SIGKILL)
                    victim = None

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(WAIT_S)) as client:
        await asyncio.gather(*(read(client, number) for number in range(NUM_STREAMS)))
    assert victim is None, "the worker was not killed"
    return streams


def pid_of(served: Served, name: str) -> int:
    for pid in sorted(served.descendants()):
        if f"QUIRE_PROCESS_NAME={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no {name}:\n{served.output}")


@dataclass
class Tally:
    num_identical: int
    num_streams: int
    num_cut: int  # streams resumed by the other worker
    longest_gap_s: float
    median_gap_s: float  # of the longest gap of each stream


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    if given.device == "cuda" and len(names) == given.ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names * 2)
    engine = [
        f"--device={given.device}",
        "--dtype=float32",
        "-dp=2",
        f"-tp={given.ranks}",
        "--swap-space=0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), *engine, "--no-enable-prefix-caching", "--max-num-seqs=64")
        try:
            asyncio.run(stream_all(served.url, None))  # warms up
            expected = asyncio.run(stream_all(served.url, None))
            found = asyncio.run(stream_all(served.url, pid_of(served, "worker-0")))
        finally:
            served.terminate()
    print("".join(line for line in served.lines if "dead workers" in line or "ended by itself" in line))
    moved = re.findall(r"jobs of dead workers go back to the queue num_jobs=(\d+)", served.output)
    gaps_s = [stream.longest_gap_s for stream in found]
    tally = Tally(
        num_identical=sum(one.text == other.text for one, other in zip(expected, found, strict=True)),
        num_streams=NUM_STREAMS,
        num_cut=sum(map(int, moved)),
        longest_gap_s=max(gaps_s),
        median_gap_s=statistics.median(gaps_s),
    )
    report(asdict(tally), given.out)
    return int(tally.num_identical != NUM_STREAMS or tally.num_cut == 0)


if __name__ == "__main__":
    sys.exit(main())
