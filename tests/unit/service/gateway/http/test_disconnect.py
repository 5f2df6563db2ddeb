"""Clients that leave or do not read, over real sockets: a test client's own cancellation would hide the bug."""

import asyncio
import json

import pytest

from service.errors import EndReason
from service.gateway.http import connection as protocol
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, open_gateway, speech
from tests.support.raw_http import RawClient

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SOON_S = 5.0


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_text", [True, False])
async def test_job_is_cancelled_when_its_client_leaves(gateway, leave, stream, after_text):
    text = "Hello" if after_text else ""
    gateway.worker.script = lambda job: speech(gateway.model, text, end=None) if text else Script([], None)
    client = await RawClient.connect(gateway.url)
    await client.post(CHAT, {**BODY, "stream": stream})
    while not gateway.worker.jobs:
        await asyncio.sleep(0.005)
    if stream and after_text:
        await client.read_until(b'"content":"H"')
    await leave(client)
    async with asyncio.timeout(SOON_S):
        cancel = await gateway.worker.cancelled()
    assert (cancel.job_id, cancel.reason) == (gateway.worker.jobs[0].job_id, EndReason.CANCELLED)
    assert (await gateway.get("/livez"))[0] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_own_side_gets_its_answer(gateway, stream):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello world.", step_s=0.05)
    client = await RawClient.connect(gateway.url)
    await client.post(CHAT, {**BODY, "stream": stream})
    client.half_close()
    async with asyncio.timeout(SOON_S):
        if stream:
            assert (await client.read_until(b"data: [DONE]")).count(b'"content":') > 3
        else:
            status, _, body = await client.response()
            assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "Hello world.")
            assert await client.at_eof()
    assert gateway.worker.cancels == []
    await client.close()


async def test_a_client_that_closed_its_side_at_once_with_its_request_gets_its_answer(gateway):
    """Send everything at once, so that the FIN arrives before the request is read."""
    client = await RawClient.connect(gateway.url)
    await client.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.half_close()
    async with asyncio.timeout(SOON_S):
        assert (await client.response())[0] == 200
        assert await client.at_eof()
    await client.close()


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_client_that_closes_its_own_side_and_leaves_later_is_missed(gateway, leave, has_begun):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None) if has_begun else Script([], None)
    client = await RawClient.connect(gateway.url)
    await client.post(CHAT, {**BODY, "stream": has_begun})
    async with asyncio.timeout(2 * SOON_S):
        if has_begun:
            await client.read_until(b'"content":"H"')
        client.half_close()
        await client.read_until(b": keep-alive\n\n" if has_begun else protocol.INTERIM * 3)
        assert gateway.worker.cancels == []
        await leave(client)
        assert (await gateway.worker.cancelled()).reason is EndReason.CANCELLED


async def test_one_that_was_turned_away_and_closes_its_own_side_is_let_go(model_folder, caplog):
    async with open_gateway(model_folder, max_connections=1) as gateway:
        held, client = await RawClient.connect(gateway.url), await RawClient.connect(gateway.url)
        async with asyncio.timeout(SOON_S):
            assert (await client.response())[0] == 503
            client.half_close()
            assert await client.at_eof()
        for one in (held, client):
            await one.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 500\r\n\r\n{",
        b"GET /v1/models HTTP/1.1\r\nHost: loc",
        b"",
    ],
)
async def test_a_client_that_closes_its_own_side_within_its_request_is_gone(gateway, request_bytes):
    client = await RawClient.connect(gateway.url)
    await client.send(request_bytes)
    client.half_close()
    async with asyncio.timeout(SOON_S):
        assert await client.at_eof()
    assert gateway.worker.jobs == []
    await client.close()


async def test_what_an_old_client_means_by_closing_its_side_cannot_be_known(gateway):
    """HTTP/1.0 has no interim responses, so the client cannot be probed."""
    gateway.worker.script = lambda job: Script([], None)
    client = await RawClient.connect(gateway.url)
    data = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    await client.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    while not gateway.worker.jobs:
        await asyncio.sleep(0.005)
    client.half_close()
    async with asyncio.timeout(SOON_S):
        await gateway.worker.cancelled()
        assert await client.at_eof()
    await client.close()


async def test_queued_job_is_cancelled_when_its_client_leaves(model_folder):
    async with open_gateway(model_folder) as gateway:
        gateway.worker.paused = True
        await asyncio.sleep(0.25)
        client = await RawClient.connect(gateway.url)
        await client.post(CHAT, BODY)
        while not (await gateway.queue.queue_state()).num_waiting:
            await asyncio.sleep(0.005)
        await client.reset()
        async with asyncio.timeout(SOON_S):
            while (await gateway.queue.queue_state()).num_waiting:
                await asyncio.sleep(0.005)
        gateway.worker.paused = False
        assert (await gateway.post(CHAT, BODY))[0] == 200
        assert len(gateway.worker.jobs) == 1


async def test_many_leave_at_once_and_the_rest_is_served(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    clients = [await RawClient.connect(gateway.url) for _ in range(20)]
    for client in clients:
        await client.post(CHAT, {**BODY, "stream": True})
    for client in clients:
        await client.read_until(b"data: ")
    gateway.worker.script = lambda job: speech(gateway.model, "Hello world.", step_s=0.02)
    staying = [asyncio.create_task(gateway.post(CHAT, BODY)) for _ in range(5)]
    for client in clients:
        await client.reset()
    async with asyncio.timeout(SOON_S):
        await gateway.worker.cancelled(20)
    assert [status for status, _ in await asyncio.gather(*staying)] == [200] * 5
    assert len(gateway.worker.cancels) == 20


async def test_client_that_does_not_read_is_cut_off(model_folder):
    async with open_gateway(model_folder, write_timeout=0.2) as gateway:
        gateway.worker.script = lambda job: Script([[65]] * 450, None)
        client = await RawClient.connect(gateway.url, receive_bytes=4096)
        await client.post(CHAT, {**BODY, "stream": True, "logprobs": True, "top_logprobs": 20})
        await client.read_until(b"data: ")
        client.stop_reading()
        async with asyncio.timeout(SOON_S):
            cancel = await gateway.worker.cancelled()
        assert cancel.reason is EndReason.CANCELLED
        await client.reset()


async def test_sixty_four_streams_at_once(gateway):
    texts = {str(i): f"answer {i} is hello world" for i in range(64)}

    def script(job):
        return speech(gateway.model, texts[str(job.sampling.seed)], step_s=0.001)

    gateway.worker.script = script

    async def ask(number):
        body = {"model": MODEL, "prompt": "the", "seed": number, "max_tokens": 99}
        return await gateway.events("/v1/completions", body)

    answers = await asyncio.gather(*(ask(number) for number in range(64)))
    for number, events in enumerate(answers):
        assert events[-1] == "[DONE]"
        spoken = "".join(event.split('"text":"', 1)[1].split('"', 1)[0] for event in events[:-1])
        assert spoken == texts[str(number)]
    assert gateway.worker.cancels == []
