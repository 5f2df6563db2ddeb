"""Frames that are ready together go out in one write: aiohttp makes an HTTP chunk of each write."""

from __future__ import annotations

import asyncio
import json

import pytest

from service.errors import EndReason
from service.gateway.http.sse import MAX_WRITE_BYTES
from service.queue.codec import pack_ids
from service.queue.messages import Event, Part, Usage
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL
from tests.support.raw_http import RawClient

SOON_S = 10.0
USAGE = Usage(prompt_tokens=1, completion_tokens=1)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 400},
}


class Steps:
    """A begun stream, and a worker that publishes what it is given."""

    def __init__(self, gateway, client: RawClient, job_id: str):
        self._gateway = gateway
        self._client = client
        self._job_id = job_id
        self._number = 0
        self._has_head = False

    async def publish(self, words: list[str], end: EndReason | None = None) -> None:
        """Publish an event per word and perhaps the end, all at once."""
        ids = map(self._gateway.model.tokenizer.encode, words)
        events = [self._event(parts=(Part(tokens=pack_ids(of_word)),)) for of_word in ids]
        events += [] if end is None else [self._event(end=end, usage=USAGE)]
        await self._gateway.worker.publish(events)

    def _event(self, **fields) -> Event:
        self._number += 1
        return Event(job_id=self._job_id, number=self._number, **fields)

    async def close(self) -> None:
        await self._client.close()

    async def frames(self) -> list[dict[str, str]]:
        """Return the frames of the next write; none at the end."""
        async with asyncio.timeout(SOON_S):
            if not self._has_head:
                await self._client.read_until(b"\r\n\r\n")
                self._has_head = True
            chunk = (await self._client.chunk()).decode()
        return [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in chunk.split("\n\n") if frame]


async def begin(gateway, path: str) -> Steps:
    """Start a stream and read its first write."""
    gateway.worker.script = lambda job: Script([], None)
    client = await RawClient.connect(gateway.url)
    await client.post(path, {"model": MODEL, "stream": True, **BODIES[path]})
    async with asyncio.timeout(SOON_S):
        while not gateway.worker.jobs:
            await asyncio.sleep(0.002)
    steps = Steps(gateway, client, gateway.worker.jobs[0].job_id)
    if path == "/v1/responses":
        assert [frame["event"] for frame in await steps.frames()] == ["response.created", "response.in_progress"]
    await steps.publish(["so"])
    assert text_of(await steps.frames()) == "so"
    return steps


def text_of(frames: list[dict[str, str]]) -> str:
    """Return the text in the frames of any API."""
    return "".join(map(_text_of, frames))


def _text_of(frame: dict[str, str]) -> str:
    if frame["data"] == "[DONE]":
        return ""
    data = json.loads(frame["data"])
    if frame.get("event") == "response.output_text.delta":
        return data["delta"]
    if frame.get("event") == "content_block_delta":
        return data["delta"]["text"]
    choice = (data.get("choices") or [{}])[0]
    return choice.get("text", "") or choice.get("delta", {}).get("content", "")


@pytest.mark.parametrize("path", BODIES)
async def test_events_of_one_wake_are_one_write(gateway, path):
    steps = await begin(gateway, path)
    words = ["a", "b", "c", "d", "e"]
    await steps.publish(words)
    joined = await steps.frames()
    assert text_of(joined) == "".join(words)
    assert len([frame for frame in joined if text_of([frame])]) == len(words)  # each is a frame of its own
    await steps.publish(["x"])
    alone = await steps.frames()
    assert text_of(alone) == "x"
    await steps.publish(["y", "z"], EndReason.STOP)
    last = await steps.frames()
    assert text_of(last) == "yz"
    assert await steps.frames() == []  # the end of the body
    await steps.close()
    ids = [int(frame["id"]) for frame in (*joined, *alone, *last) if "id" in frame]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    assert (last[-1]["data"] == "[DONE]") == ("completions" in path)


async def test_an_error_follows_the_text_that_came_with_it(gateway):
    steps = await begin(gateway, "/v1/completions")
    await steps.publish(["a", "b"], EndReason.INTERNAL)
    frames = await steps.frames()
    assert text_of(frames) == "ab"
    assert "error" in json.loads((await steps.frames())[0]["data"])
    await steps.close()


async def test_a_write_is_bounded(gateway):
    steps = await begin(gateway, "/v1/completions")
    words = ["word " * 20] * 200
    await steps.publish(words)
    frames = []
    while text_of(frames) != "".join(words):
        new = await steps.frames()
        assert sum(len(frame["data"]) for frame in new) < MAX_WRITE_BYTES + 1000
        frames += new
    assert len(frames) == len(words)
    await steps.close()
