"""A storm of lost answers: Redis executes commands but its answers are lost or late, or the commands are lost.

`python -m tests.chaos.lost_answers --times 5000` runs two gateways with the demo model, a worker and producers, each
with a proxy to Redis that loses answers: whole answers, streams that are dropped and resumed at either gateway,
background requests, stored responses, producers' entries that are rewritten after an unanswered XADD, requests without
a key, and a few batches. Each is repeated under the same Idempotency-Key or id until it is answered. Every text must
equal that of an undisturbed run, under one id, with every event and reply once; none may be cancelled, and the queue
must hold no other job.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service.config.settings import Settings
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from service.queue import keys
from tests.support.demo_engine import DEMO
from tests.support.fleet import Fleet
from tests.support.measuring import flags, report
from tests.support.queue_pair import open_pair
from tests.support.swallowing_proxy import SwallowingProxy, answered, at_random, swallowing

MODEL = "demo"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PRODUCER = "alice"
GATEWAY_TIMEOUT_S = 1.0
RETRY_S = 0.3
PATIENCE_S = 250.0
LINES_PER_BATCH = 8
AGAIN = (429, 500, 502, 503, 504)
SUBJECTS = ("a fox", "the sea", "two friends", "rain", "a lost key", "bread")
SAMPLING = ({"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0.9, "seed": 8, "top_p": 0.9})


@dataclass(frozen=True)
class PlannedRequest:
    """A request and the way its answer is read."""

    kind: str
    path: str
    body: str  # JSON
    golden_of: str  # plain request with the same answer

    def fields(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Tally:
    num_requests: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    num_tries: int = 0
    num_resumed: int = 0
    num_faults: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.different or self.doubled or self.cancelled or self.left)


def options(max_tokens: int) -> list[PlannedRequest]:
    found = []
    for subject, sampling in itertools.product(SUBJECTS, SAMPLING):
        text = {"model": MODEL, "prompt": f"A story about {subject}. Once", "max_tokens": max_tokens, **sampling}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": f"A story about {subject}."}], **sampling}
        chat |= {"max_tokens": max_tokens}
        answer = {"model": MODEL, "input": f"A story about {subject}.", "max_output_tokens": max_tokens, **sampling}
        for kind, path, body, more in (
            ("whole", COMPLETIONS, text, {}),
            ("without a key", COMPLETIONS, text, {}),
            ("stream", CHAT, chat, {"stream": True}),
            ("stream", COMPLETIONS, text, {"stream": True}),
            ("background", CHAT, chat, {"background": True}),
            ("response", RESPONSES, answer, {}),
            ("response stream", RESPONSES, answer, {"stream": True}),
            ("background response", RESPONSES, answer, {"background": True}),
            ("producer", COMPLETIONS, text, {"stream": True}),
            ("producer", CHAT, chat, {}),
        ):
            found.append(PlannedRequest(kind, path, json.dumps({**body, **more}), json.dumps([path, body])))
    return found


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def delta_of(event: dict[str, Any]) -> str:
    if "choices" in event:
        choice = event["choices"][0] if event["choices"] else {}
        return choice["text"] if "text" in choice else choice.get("delta", {}).get("content") or ""
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


class Storm:
    """Clients of two gateways, and producers."""

    def __init__(self, urls: list[str], http: aiohttp.ClientSession, producer, dice: random.Random) -> None:
        self._urls, self._http, self._producer, self._dice = urls, http, producer, dice
        self._numbers = itertools.count(1)
        self.tally = Tally()
        self.goldens: dict[str, str] = {}
        self.ids: set[str] = set()  # of requests known to clients
        self.num_unnamed = 0  # jobs whose ids clients never receive

    async def ask(self, planned: PlannedRequest) -> None:
        name = f"{planned.kind} {next(self._numbers)}"
        self.tally.num_requests += 1
        self.tally.by_kind[planned.kind] = self.tally.by_kind.get(planned.kind, 0) + 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                received = await self._asking(planned)(planned, name)
        except TimeoutError:
            self.tally.lost.append(name)
        except Cancelled as cancelled:
            self.tally.cancelled.append(f"{name}: {cancelled}")
        except Doubled as doubled:
            self.tally.doubled.append(f"{name}: {doubled}")
        else:
            if received != self.goldens[planned.golden_of]:
                self.tally.different.append(f"{name}: {received!r} is not {self.goldens[planned.golden_of]!r}")

    def _asking(self, planned: PlannedRequest):
        return {
            "stream": self._stream,
            "response stream": self._stream,
            "background": self._background,
            "background response": self._background,
            "producer": self._produce,
        }.get(planned.kind, self._whole)

    async def _whole(self, planned: PlannedRequest, name: str) -> str:
        key = {} if planned.kind == "without a key" else _key(name)
        answer = await self._post(planned.path, planned.body, key)
        if key:
            again = await self._post(planned.path, planned.body, key)
            if again["id"] != answer["id"] or text_of(again) != text_of(answer):
                raise Doubled(f"{answer['id']}, then {again['id']}")
        if planned.kind == "response":
            stored = await self._stored(f"{RESPONSES}/{answer['id']}")
            if stored["output"] != answer["output"]:
                raise Doubled("another answer is stored")
        return text_of(answer)

    async def _background(self, planned: PlannedRequest, name: str) -> str:
        state = await self._post(planned.path, planned.body, _key(name))
        path = f"{RESPONSES}/{state['id']}" if planned.path == RESPONSES else f"/v1/requests/{state['id']}"
        ended = await self._stored(path)
        return text_of(ended if planned.path == RESPONSES else ended["response"])

    async def _stored(self, path: str) -> dict[str, Any]:
        """Return the stored answer of a request or response once it has ended."""
        while True:
            status, answer = await self._try("GET", path)
            if status == 200 and answer["status"] not in ("queued", "in_progress"):
                if answer["status"] != "completed" and answer["status"] != "incomplete":
                    raise Cancelled(answer["status"], answer["error"])
                return answer
            assert status in (200, *AGAIN), (path, answer)
            await asyncio.sleep(RETRY_S)

    async def _post(self, path: str, body: str, headers: dict[str, str]) -> dict[str, Any]:
        while True:
            status, answer = await self._try("POST", path, body, headers)
            if status in (200, 202):
                return answer
            assert status in AGAIN, (path, status, answer)
            await asyncio.sleep(RETRY_S)

    async def _try(self, method: str, path: str, body: str | None = None, headers=None) -> tuple[int, dict[str, Any]]:
        self.tally.num_tries += 1
        url, headers = self._dice.choice(self._urls) + path, {"Content-Type": "application/json", **(headers or {})}
        async with self._http.request(method, url, data=body, headers=headers) as response:
            answer = await response.json()
            if path in (CHAT, COMPLETIONS, RESPONSES) and "X-Request-Id" in response.headers:
                self.ids.add(response.headers["X-Request-Id"])
            _check_cancelled(response.status, answer)
            return response.status, answer

    async def _stream(self, planned: PlannedRequest, name: str) -> str:
        received: dict[int, str] = {}
        while True:
            status, is_done = await self._read_some(planned, name, received)
            if is_done:
                if sorted(received) != list(range(1, len(received) + 1)):
                    raise Doubled(f"events {sorted(received)}")
                return "".join(received[number] for number in sorted(received))
            self.tally.num_resumed += status == 200
            await asyncio.sleep(RETRY_S)

    async def _read_some(self, planned: PlannedRequest, name: str, received: dict[int, str]) -> tuple[int, bool]:
        """Return status, and whether the stream was read to its end; it may be dropped before."""
        self.tally.num_tries += 1
        drop_after = self._dice.choice((None, None, None, self._dice.randint(1, 12)))
        headers = {"Content-Type": "application/json", **_key(name)}
        if received:
            headers["Last-Event-ID"] = str(max(received))
        url = self._dice.choice(self._urls) + planned.path
        async with self._http.post(url, data=planned.body, headers=headers) as response:
            if "X-Request-Id" in response.headers:
                self.ids.add(response.headers["X-Request-Id"])
            if response.status != 200:
                answer = await response.json()
                _check_cancelled(response.status, answer)
                assert response.status in AGAIN, answer
                return response.status, False
            number, is_done = 0, False
            async for line in response.content:
                if is_done and line.strip():
                    raise Doubled(f"{line!r} behind the end")
                if line.startswith(b"HTTP/"):
                    raise Doubled("a second HTTP answer in the stream")
                if line.startswith(b"id: "):
                    number = int(line[4:])
                elif line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event and "choices" not in event and "type" not in event:
                        _check_cancelled(event["error"].get("code"), event)
                        return 200, False
                    if number in received:
                        raise Doubled(f"event {number} twice")
                    received[number] = delta_of(event)
                    kind = event.get("type", "")
                    if kind == "response.failed":
                        raise Cancelled(json.dumps(event["response"]["error"]))
                    is_done = kind in ("response.completed", "response.incomplete")
                if drop_after is not None and len(received) >= drop_after and not is_done:
                    return 200, False
            return 200, is_done

    async def _produce(self, planned: PlannedRequest, name: str) -> str:
        """Write an entry until Redis answers, and read its replies."""
        job_id = name.replace(" ", "-")
        job = {"v": 1, "id": job_id, "endpoint": planned.path, "body": planned.fields()}
        self.num_unnamed += 1
        await self._redis(lambda: self._producer.xadd(keys.ingress(PRODUCER), {"m": msgpack.packb(job)}))
        stream, last, replies = keys.reply(PRODUCER, job_id), "0", []
        while not (replies and replies[-1]["done"]):
            for _, entries in await self._redis(lambda at=last: self._producer.xread({stream: at}, block=500)):
                for entry_id, entry in entries:
                    last = entry_id.decode()
                    replies.append(msgpack.unpackb(entry[b"m"]) | {"entry": last})
        await asyncio.sleep(self._dice.random())
        more = await self._redis(lambda: self._producer.xread({stream: last}))
        numbers = [reply["number"] for reply in replies]
        entries = [f"{number}-0" for number in numbers]
        if more or numbers != list(range(1, len(numbers) + 1)) or [reply["entry"] for reply in replies] != entries:
            raise Doubled(f"replies {numbers} in {[reply['entry'] for reply in replies]}, then {more}")
        if "error" in replies[-1]:
            raise Cancelled(replies[-1]["error"])
        return "".join(reply["text"] for reply in replies)

    async def _redis(self, attempt):
        while True:
            self.tally.num_tries += 1
            try:
                return await attempt()
            except (RedisConnectionError, RedisTimeoutError):
                await asyncio.sleep(RETRY_S / 3)

    async def batch(self, wanted: list[PlannedRequest]) -> None:
        """Upload some requests as a batch, wait for it, and read its answers."""
        self.tally.by_kind["batch"] = self.tally.by_kind.get("batch", 0) + 1
        self.tally.num_requests += len(wanted)
        self.num_unnamed += len(wanted)
        bodies = [json.loads(planned.golden_of)[1] for planned in wanted]
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body})
            for number, body in enumerate(bodies)
        ]
        file = await self._upload("\n".join(lines))
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = await self._post("/v1/batches", json.dumps(body), {})
        async with asyncio.timeout(PATIENCE_S):
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(RETRY_S)
                status, found = await self._try("GET", f"/v1/batches/{batch['id']}")
                batch = found if status == 200 else batch
        answers = [json.loads(line) for line in (await self._content(batch["output_file_id"])).splitlines()]
        if sorted(answer["custom_id"] for answer in answers) != sorted(str(number) for number in range(len(wanted))):
            self.tally.doubled.append(f"batch {batch}: {[answer['custom_id'] for answer in answers]}")
        for answer in answers:
            if text_of(answer["response"]["body"]) != self.goldens[wanted[int(answer["custom_id"])].golden_of]:
                self.tally.different.append(f"batch {batch['id']}: {answer}")

    async def _upload(self, text: str) -> dict[str, Any]:
        while True:
            form = aiohttp.FormData()
            form.add_field("purpose", "batch")
            form.add_field("file", text.encode(), filename="lines.jsonl")
            async with self._http.post(self._dice.choice(self._urls) + "/v1/files", data=form) as response:
                answer = await response.json()
                if response.status == 200:
                    return answer
            await asyncio.sleep(RETRY_S)

    async def _content(self, file_id: str) -> str:
        while True:
            async with self._http.get(f"{self._dice.choice(self._urls)}/v1/files/{file_id}/content") as response:
                if response.status == 200:
                    try:
                        return await response.text()
                    except aiohttp.ClientPayloadError:
                        pass  # cut off, as expected
            await asyncio.sleep(RETRY_S)


class Cancelled(Exception):
    """A request was cancelled that no client cancelled."""


class Doubled(Exception):
    """An event, reply or job occurred twice."""


def _key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name.replace(" ", "-")}


def _check_cancelled(status: Any, answer: dict[str, Any]) -> None:
    code = (answer.get("error") or {}).get("code") if isinstance(answer.get("error"), dict) else None
    if status in (499, 409) or code in ("cancelled", "lost", "deadline"):
        raise Cancelled(json.dumps(answer))


async def golden(http: aiohttp.ClientSession, url: str, planned: PlannedRequest) -> str:
    path, body = json.loads(planned.golden_of)
    async with http.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return text_of(await response.json())


@asynccontextmanager
async def open_house(folder: Path):
    """Open two gateways, a worker and a producers' connection, each with its own proxy to Redis, without faults at
    first."""
    fleet = Fleet(folder, lease_s=5.0)
    try:
        async with AsyncExitStack() as opened:
            proxies = [await opened.enter_async_context(swallowing(fleet.redis.url, late_s=1.5)) for _ in range(3)]
            worker_proxy = await opened.enter_async_context(swallowing(fleet.redis.url, late_s=3.5))
            fleet.redis_url = worker_proxy.url
            await fleet.have(1, step_s=0.0)
            urls = []
            for number, proxy in enumerate(proxies[:2]):
                settings = Settings(
                    model=DEMO, served_model_name=MODEL, port=0, drain_timeout=1.0, max_connections_per_client=4096,
                    producers=(PRODUCER,),
                )  # fmt: skip
                queue = await open_pair(proxy.url, f"gateway{number}", timeout_s=GATEWAY_TIMEOUT_S)
                opened.push_async_callback(queue.close)
                urls.append(await opened.enter_async_context(serving(settings, ServedModel.read(settings), queue)))
            http = await opened.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            producer = redis.asyncio.Redis.from_url(proxies[2].url, socket_timeout=3.0)
            opened.push_async_callback(producer.aclose)
            yield fleet, urls, http, producer, [*proxies, worker_proxy]
    finally:
        fleet.close()


async def run(
    folder: Path, times: int, num_at_once: int, share: float, num_batches: int = 1, seed: int = 1, max_tokens: int = 12
) -> Tally:
    """Run the storm; `share` of all commands get a fault."""
    dice = random.Random(seed)
    async with open_house(folder) as (fleet, urls, http, producer, proxies):
        storm, wanted = Storm(urls, http, producer, dice), options(max_tokens)
        for planned in wanted:
            if planned.golden_of not in storm.goldens:
                storm.goldens[planned.golden_of] = await golden(http, urls[0], planned)
        with redis.Redis.from_url(fleet.redis.url) as redis_client:
            before = set(redis_client.scan_iter("{quire}:{*}:events", 1000))
        for proxy in proxies:
            proxy.choose = at_random(dice, share)
        turns = asyncio.Semaphore(num_at_once)

        async def one(planned: PlannedRequest) -> None:
            async with turns:
                await storm.ask(planned)

        plain = [planned for planned in wanted if planned.kind == "whole"]
        batches = [storm.batch(dice.choices(plain, k=LINES_PER_BATCH)) for _ in range(num_batches)]
        await asyncio.gather(*(one(planned) for planned in dice.choices(wanted, k=times)), *batches)
        for proxy in proxies:
            proxy.choose = answered
        await _check_queue(fleet, storm, before)
        _count_faults(storm.tally, proxies)
    return storm.tally


async def _check_queue(fleet: Fleet, storm: Storm, before: set[bytes], within_s: float = 30.0) -> None:
    """Check that the queue is empty and had no jobs but those requested."""
    give_up_s, left = time.monotonic() + within_s, ["not looked yet"]
    with redis.Redis.from_url(fleet.redis.url) as redis_client:
        while left and time.monotonic() < give_up_s:
            await asyncio.sleep(0.2)
            sizes = {name: redis_client.hlen(name) for name in (keys.JOBS, keys.STATES, keys.CLAIMS)} | {
                name: redis_client.xlen(name)
                for name in (keys.WAITING, keys.RETURNED, keys.SUSPECTS, keys.DEAD, keys.ingress(PRODUCER))
            }
            left = [f"{name}: {size}" for name, size in sizes.items() if size]
        storm.tally.left += left
        logs = set(redis_client.scan_iter("{quire}:{*}:events", 1000)) - before
    jobs = {log.decode().split("{")[2].partition("}")[0] for log in logs}
    unknown = jobs - storm.ids
    if len(unknown) != storm.num_unnamed:
        storm.tally.doubled.append(f"{len(unknown)} jobs of producers and batches, not {storm.num_unnamed}")


def _count_faults(tally: Tally, proxies: list[SwallowingProxy]) -> None:
    counts = Counter()
    for proxy in proxies:
        for (name, fate), count in proxy.counts.items():
            if fate.value != "answered":
                counts[name] += count
    tally.faults, tally.num_faults = dict(counts.most_common()), counts.total()


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--times", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--share", type=float, default=0.02, help="of commands that get a fault (0.02)")
    parser.add_argument("--batches", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        start_s = time.monotonic()
        tally = asyncio.run(run(Path(folder), args.times, args.at_once, args.share, args.batches))
    report({**asdict(tally), "elapsed_s": round(time.monotonic() - start_s, 1)}, args.out)
    return int(not tally.is_clean)


if __name__ == "__main__":
    sys.exit(main())
