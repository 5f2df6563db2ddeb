"""A client process of `quire bench serve`: sends its share of requests when due and records the responses.

It reads its task as a JSON line from stdin, prints "ready", reads the start time (monotonic clock) as a second line,
and prints a JSON line with an `Answer` per request, in order. Times count from when a request was due, so that a late
client does not flatter the service.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import uvloop

from service.cli.client.api import EventLines

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
DELTAS = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass(frozen=True)
class Task:
    """Task of one process. `requests`: (number, prompt tokens, output tokens, seconds after start)."""

    url: str  # without a path
    api_key: str | None
    model: str
    vocab_size: int
    max_seconds: float
    requests: list[tuple[int, int, int, float]]
    prompts: list[list[int]] | list[str] | None = None  # token ids, or chat messages; None: random ids
    ignore_eos: bool = True
    max_concurrency: int | None = None  # open requests of this process


@dataclass
class Answer:
    """Times of one request, in seconds after it was due."""

    sent_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)  # when each event with text arrived
    end_s: float = 0.0
    num_tokens: int = 0  # by the service's count, else one per event
    error: str | None = None  # None: complete


def body_of(task: Task, number: int, num_prompt: int, num_output: int, prompt: list[int] | str | None = None) -> bytes:
    """Return the request body. Without a prompt, a random one is derived from `number`."""
    if isinstance(prompt, str):
        asked = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": num_output}
    else:
        asked = {"prompt": prompt or random_ids(number, task.vocab_size, num_prompt), "max_tokens": num_output}
    params = {"temperature": 0, "ignore_eos": task.ignore_eos, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return json.dumps({"model": task.model, **asked, **params, **usage}).encode()


def random_ids(number: int, vocab_size: int, num_ids: int) -> list[int]:
    return random.Random(number).choices(range(vocab_size), k=num_ids)


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    due_s: float,
    deadline_s: float,
    places: AbstractAsyncContextManager[object],
) -> Answer:
    """Send one request at `due_s`, or when it enters `places`, and read its response. Times are of `time.monotonic`."""
    answer = Answer()
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            while (left_s := due_s - time.monotonic()) > 0:  # a timer may fire slightly early
                await asyncio.sleep(left_s)
            async with places:
                answer.sent_s = time.monotonic() - due_s
                await _follow(http, url, body, due_s, answer)
    except TimeoutError:
        answer.error = "unfinished at the end of the run"
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:200]
    answer.end_s = time.monotonic() - due_s
    return answer


async def _follow(http: aiohttp.ClientSession, url: str, body: bytes, due_s: float, answer: Answer) -> None:
    events, is_done = EventLines(), False
    async with http.post(url, data=body, allow_redirects=False) as response:
        if response.status != 200:
            answer.error = f"HTTP {response.status}"
            return
        async for data in response.content.iter_any():
            now_s = time.monotonic() - due_s
            for event in events.feed(data):
                if event == b"[DONE]":
                    is_done = True
                else:
                    _note(event, now_s, answer)
    if answer.error is None and not is_done:
        answer.error = "the stream ended early"
    answer.num_tokens = answer.num_tokens or len(answer.chunks_s)


def _note(event: bytes, now_s: float, answer: Answer) -> None:
    """Record an event. Parsing costs time, so plain text events are not parsed, except in chats."""
    has_usage = b'"usage":{' in event or b'"usage": {' in event
    if not (has_usage or b'"delta":' in event or event.startswith(b'{"error"')):
        answer.chunks_s.append(now_s)
        return
    parsed = json.loads(event)
    if "error" in parsed:
        answer.error = "an error event"
        return
    if usage := parsed.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
    if any(_has_text(choice) for choice in parsed["choices"]):
        answer.chunks_s.append(now_s)


def _has_text(choice: dict[str, Any]) -> bool:
    """Return False for a chat's first chunk, which only has the role, and for its last."""
    delta = choice.get("delta")
    return delta is None or any(delta.get(name) for name in DELTAS)


async def run(task: Task, wait_for_start: Callable[[], float]) -> list[Answer]:
    """Run the task. `wait_for_start`, called once requests are prepared, returns the start time."""
    prompts: Sequence[list[int] | str | None] = task.prompts or [None] * len(task.requests)
    bodies = [body_of(task, *request[:3], prompt) for request, prompt in zip(task.requests, prompts, strict=True)]
    places = nullcontext() if task.max_concurrency is None else asyncio.Semaphore(task.max_concurrency)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if task.api_key:
        headers["Authorization"] = f"Bearer {task.api_key}"
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as http:
        start_s = wait_for_start()
        deadline_s, url = (
            start_s + task.max_seconds,
            task.url + (CHATS if isinstance(next(iter(prompts), None), str) else COMPLETIONS),
        )
        due = [start_s + request[3] for request in task.requests]
        return await asyncio.gather(
            *(ask(http, url, body, due_s, deadline_s, places) for body, due_s in zip(bodies, due, strict=True))
        )


def main() -> None:
    task = Task(**json.loads(sys.stdin.readline()))

    def wait_for_start() -> float:
        print("ready", flush=True)
        return float(sys.stdin.readline())

    answers = uvloop.run(run(task, wait_for_start))
    hand_over(json.dumps([asdict(answer) for answer in answers]).encode() + b"\n", sys.stdout.fileno())


def hand_over(line: bytes, descriptor: int) -> None:
    """Write a long line completely: `print` to unbuffered stdout loses the rest if a signal interrupts the write."""
    with open(descriptor, "wb", closefd=False) as whole:
        whole.write(line)


if __name__ == "__main__":
    main()
