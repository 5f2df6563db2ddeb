"""One tenant stores, uploads and batches as much as it can while another chats.

`python -m tests.chaos.storage_attack [--out FILE]` attacks a whole service with the demo model, case by case, and
prints the peak memory of gateways and Redis, the other tenant's waits, and the time that the service took to end. Exits
with 0 only if all are within bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
from redis import Redis

from tests.support.parts import Part
from tests.support.served import Served, descendants_of

MAX_GATEWAY_MIB, MAX_CHAT_P99_S = 600.0, 1.5
DRAIN_S, EXIT_S = 5.0, 5.0
CHAT_PAUSE_S = 0.25
MAX_ADDRESS_SPACE = 4 << 30
ATTACKER, OTHER = "attacker-key", "other-key"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20
MAX_FILE_BYTES = 64 * MIB
Pieces = Callable[[], Iterator[bytes]]


@dataclass
class Figures:
    case: str
    gateway_mib: float = 0.0
    second_gateway_mib: float = 0.0
    redis_mib: float = 0.0
    num_chats: int = 0
    chat_p50_s: float = 0.0
    chat_p99_s: float = 0.0
    chat_max_s: float = 0.0
    drain_s: float = 0.0
    answers: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def is_good(self) -> bool:
        return (
            max(self.gateway_mib, self.second_gateway_mib) < MAX_GATEWAY_MIB
            and self.num_chats > 0
            and self.chat_p99_s < MAX_CHAT_P99_S
            and self.drain_s < DRAIN_S + EXIT_S
        )


class Attack:
    """Clients and files of a case."""

    def __init__(self, served: Served, http: aiohttp.ClientSession, model: str, scale: float):
        self.url = served.url
        self.model = model
        self.scale = scale
        self.answers: Counter[str] = Counter()
        self._http = http

    def times(self, count: int) -> int:
        return max(4, int(count * self.scale))

    def received(self, what: str, status: int, answer: dict) -> None:
        error = answer.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        self.answers[f"{what} {status}{' ' + code if code else ''}"] += 1

    async def post(self, path: str, body: dict | bytes) -> dict:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**bearer(ATTACKER), "Content-Type": "application/json"}
        async with self._http.post(self.url + path, data=BytesIO(data), headers=headers) as response:
            answer = await response.json()
            self.received(path, response.status, answer)
            return answer

    async def get(self, path: str) -> dict:
        async with self._http.get(self.url + path, headers=bearer(ATTACKER)) as response:
            return await response.json()

    async def upload(self, pieces: Pieces, num_bytes: int | None = None) -> str | None:
        """Upload a file; return its id. `num_bytes`: declared length; None: chunked."""
        head = (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        )
        tail = b"\r\n--x--\r\n"

        async def body() -> AsyncIterator[bytes]:
            yield head
            for piece in pieces():
                yield piece
            yield tail

        headers = {**bearer(ATTACKER), "Content-Type": "multipart/form-data; boundary=x"}
        if num_bytes is not None:
            headers["Content-Length"] = str(len(head) + num_bytes + len(tail))
        try:
            async with self._http.post(self.url + "/v1/files", data=body(), headers=headers) as response:
                answer = await response.json()
                self.received("/v1/files", response.status, answer)
                return answer.get("id")
        except aiohttp.ClientError as error:
            self.answers[f"/v1/files {type(error).__name__}"] += 1
            return None


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def rows(num_rows: int, num_bytes: int, model: str) -> Pieces:
    """Return a file of this many lines of about this many bytes, at most 64 MiB."""

    def pieces() -> Iterator[bytes]:
        block, size, total = [], 0, 0
        for number in range(num_rows):
            body = {"model": model, "prompt": "x", "max_tokens": 1}
            row = json.dumps({"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}).encode()
            row += b" " * (num_bytes - len(row) - 1) + b"\n"
            total += len(row)
            if total > MAX_FILE_BYTES:
                break
            block.append(row)
            size += len(row)
            if size > 65536:
                yield b"".join(block)
                block, size = [], 0
        yield b"".join(block)

    return pieces


async def bomb(attack: Attack, files: list[Pieces], num_batches: int, for_s: float) -> None:
    """Run batches of each file for a while, or until each has failed."""
    ids = [await attack.upload(file) for file in files]
    batches = [
        await attack.post(
            "/v1/batches", {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        )
        for file_id in ids
        if file_id
        for _ in range(num_batches)
    ]
    give_up_s = time.monotonic() + for_s
    while time.monotonic() < give_up_s:
        await asyncio.sleep(1.0)
        states = Counter(
            [(await attack.get(f"/v1/batches/{each['id']}"))["status"] for each in batches if "id" in each]
        )
        if not set(states) - {"failed", "completed"}:
            break
    for state, count in states.items():
        attack.answers[f"batches {state}"] = count


async def batch_of_minimal_lines(attack: Attack) -> None:
    await bomb(attack, [rows(int(700_000 * attack.scale), 0, attack.model)], attack.times(30), 60)


async def batch_of_as_many_lines_as_may_be(attack: Attack) -> None:
    await bomb(attack, [rows(50_000, int(1340 * attack.scale), attack.model)], attack.times(30), 60)


async def batch_of_long_lines(attack: Attack) -> None:
    await bomb(attack, [rows(int(32 * attack.scale) or 1, 2 * MIB - 4096, attack.model)], attack.times(30), 60)


async def batches_of_several_files(attack: Attack) -> None:
    await bomb(attack, [rows(50_000, int(1200 * attack.scale), attack.model) for _ in range(5)], attack.times(10), 60)


async def parallel_uploads(attack: Attack, *, tells_length: bool = True) -> None:
    num_pieces = int(60e6 * attack.scale) // 65536

    def pieces() -> Iterator[bytes]:
        for _ in range(num_pieces):
            yield b"x" * 65536

    length = num_pieces * 65536 if tells_length else None
    await asyncio.gather(*(attack.upload(pieces, length) for _ in range(12)))


async def parallel_uploads_of_untold_length(attack: Attack) -> None:
    await parallel_uploads(attack, tells_length=False)


async def parallel_bodies(attack: Attack) -> None:
    """Send bodies of the maximum length."""
    body = {"model": attack.model, "prompt": "x", "user": "y" * (2 * MIB - 4096)}
    data = json.dumps(body).encode()
    await asyncio.gather(*(attack.post(COMPLETIONS, data) for _ in range(int(200 * attack.scale))))


async def parallel_brackets(attack: Attack) -> None:
    """Send bodies of the maximum length that take longest to parse."""
    data = json.dumps({"model": attack.model, "prompt": "x", "user": [[]] * 500_000}).encode()
    await asyncio.gather(*(attack.post(COMPLETIONS, data) for _ in range(int(100 * attack.scale))))


async def stored_responses(attack: Attack) -> None:
    """Store responses with short text for the model and long other fields, which cost no tokens."""
    note = [{"type": "x", "text": "y" * 1000}] * 1900

    part = {"type": "output_text", "text": "x", "annotations": note, "logprobs": []}
    items = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "x"}]
    schema = {"type": "object", "description": "d" * 60_000, "properties": {}}
    received = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    asked = {"model": attack.model, "max_output_tokens": 1}
    bodies = [json.dumps({**asked, **how}).encode() for how in ({"input": items}, {"input": "x", "text": received})]
    numbers = iter(range(int(1_500 * attack.scale)))

    async def some() -> None:
        for number in numbers:
            await attack.post("/v1/responses", bodies[number % 2])

    await asyncio.gather(*(some() for _ in range(8)))


async def records_of_requests(attack: Attack) -> None:
    """Send background requests with long bodies and short prompts."""
    schema = {"type": "object", "description": "d" * 60_000, "properties": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"model": attack.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    data = json.dumps({**body, "background": True, "response_format": wanted}).encode()
    numbers = iter(range(int(1_000 * attack.scale)))

    async def some() -> None:
        for _ in numbers:
            await attack.post(CHAT, data)

    await asyncio.gather(*(some() for _ in range(8)))


CASES: dict[str, Callable[[Attack], Awaitable[None]]] = {
    case.__name__: case
    for case in (
        batch_of_minimal_lines,
        batch_of_as_many_lines_as_may_be,
        batch_of_long_lines,
        batches_of_several_files,
        parallel_uploads,
        parallel_uploads_of_untold_length,
        parallel_bodies,
        parallel_brackets,
        stored_responses,
        records_of_requests,
    )
}


FLAGS = {
    "stored_responses": ("--max-stored-bytes-per-tenant", str(32 * MIB)),
    "records_of_requests": ("--max-stored-bytes-per-tenant", str(32 * MIB)),
}
"""Flags of cases that would take an hour to reach the default bound."""


async def run(
    folder: Path, case: str, scale: float = 1.0, *, takes_over: bool = True, flags: tuple[str, ...] | None = None
) -> Figures:
    """Run one case on a service of its own; with batches, another gateway takes over at the end."""
    figures = Figures(case)
    flags = FLAGS.get(case, ()) if flags is None else flags
    served = Served(folder / "data", "--api-key", f"{ATTACKER},{OTHER}", "--drain-timeout", str(DRAIN_S), *flags)
    try:
        gateway = _gateway_of(served)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
            model = await _model(http, served.url)
            attack = Attack(served, http, model, scale)
            with chatting(served.url, model, figures):
                await CASES[case](attack)
            figures.answers = dict(sorted(attack.answers.items()))
        with Redis.from_url(served.redis_url) as redis:
            figures.redis_mib = redis.info("memory")["used_memory_peak"] / MIB
        figures.gateway_mib = peak_mib(gateway)
        if takes_over and case.startswith("batch"):
            figures.second_gateway_mib = _second_gateway(folder, served.redis_url)
        began_at_s = time.monotonic()
        served.terminate()
        figures.drain_s = time.monotonic() - began_at_s
    except Exception as error:
        served.kill()
        error.add_note(f"{dict(attack.answers)}, and the service printed:\n{served.output[-4000:]}")
        raise
    finally:
        served.kill()
    return figures


def _second_gateway(folder: Path, redis_url: str, for_s: float = 20.0) -> float:
    """Run another gateway on the same queue for a while; return its peak memory, MiB."""
    with tempfile.TemporaryDirectory(prefix="quire-") as short:
        part = Part(Path(short) / "second", "gateway", "--port", "0", "--redis-url", redis_url, "--drain-timeout", "1")
        try:
            part.until_received("READY=1")
            time.sleep(for_s)
            return peak_mib(part.process.pid)
        finally:
            part.end()


@contextmanager
def chatting(url: str, model: str, figures: Figures) -> Iterator[None]:
    """While inside, another tenant chats, one chat at a time, from its own process: only the service can make it
    wait."""
    spawning = multiprocessing.get_context("spawn")
    stop, received = spawning.Event(), spawning.SimpleQueue()
    process = spawning.Process(target=_chat, args=(url, model, stop, received), daemon=True)
    process.start()
    try:
        yield
    finally:
        stop.set()
        waits = received.get()
        process.join()
    if isinstance(waits, str):
        raise AssertionError(waits)
    waits.sort()
    figures.num_chats = len(waits)
    figures.chat_p50_s, figures.chat_max_s = round(waits[len(waits) // 2], 3), round(waits[-1], 3)
    figures.chat_p99_s = round(waits[min(len(waits) - 1, int(len(waits) * 0.99))], 3)


def _chat(url: str, model: str, stop: Event, received: SimpleQueue) -> None:
    """Put the seconds of each chat into `received`, or the error."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    headers = {**bearer(OTHER), "Content-Type": "application/json"}
    waits: list[float] = []
    try:
        while not stop.is_set() or not waits:
            began_at_s = time.monotonic()
            with urlopen(Request(url + CHAT, body, headers), timeout=60) as response:
                response.read()
            waits.append(time.monotonic() - began_at_s)
            time.sleep(CHAT_PAUSE_S)
    except OSError as error:
        answer = error.read() if isinstance(error, HTTPError) else b""
        received.put(f"a chat failed after {len(waits)}: {error} {answer}")
    else:
        received.put(waits)


def peak_mib(pid: int) -> float:
    """Return the process's peak memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the process is gone")


def _gateway_of(served: Served) -> int:
    (found,) = [
        pid for pid in descendants_of(served.process.pid) if b"\0gateway\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


async def _model(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url + "/v1/models", headers=bearer(OTHER)) as response:
        return (await response.json())["data"][0]["id"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes; 1 is the attack that was found")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found = []
    for case in CASES if asked.case == "all" else [asked.case]:
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            found.append(asyncio.run(run(Path(folder), case, asked.scale)))
        print(json.dumps(asdict(found[-1])), "good" if found[-1].is_good else "BAD", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps([asdict(figures) for figures in found], indent=2) + "\n")
    return 0 if all(figures.is_good for figures in found) else 1


if __name__ == "__main__":
    sys.exit(main())
