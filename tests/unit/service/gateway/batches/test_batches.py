"""Files and batches over HTTP, with the official client."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import openai
import pytest

from service.config.settings import Settings
from service.errors import EndReason
from service.gateway.batches import progress, runner
from service.gateway.openapi import answers as openapi_answers
from service.gateway.process import serving
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, QuickQueue, open_gateway, speech, write_model

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(progress, "RETRY_S", 0.05)
    monkeypatch.setattr(runner, "POLL_INTERVAL_S", 0.1)


def line(number: int, **changes) -> dict:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": 20}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(*lines: dict) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def client_of(gateway, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def ended(client, batch_id: str):
    async with asyncio.timeout(20):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.02)


async def submit(client, data: bytes, endpoint: str = CHAT):
    file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def answers(client, file_id: str) -> list[dict]:
    return [json.loads(row) for row in (await client.files.content(file_id)).text.splitlines()]


async def test_files_come_and_go(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        data = jsonl(line(1))
        file = await client.files.create(file=("my requests.jsonl", data), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("my requests.jsonl", len(data), "batch")
        assert (await client.files.content(file.id)).content == data
        assert [each.id async for each in client.files.list()] == [file.id]
        assert (await client.files.delete(file.id)).deleted
        assert [each.id async for each in client.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


class Keeping(QuickQueue):
    """Prevents work on batches while it `keeps` them."""

    keeps = True

    def __init__(self):
        super().__init__()
        hold_batch = self.batches.hold_batch

        async def hold_unless_kept(batch_id, holder, for_s):
            return not self.keeps and await hold_batch(batch_id, holder, for_s)

        self.batches.hold_batch = hold_unless_kept


async def test_a_batch_reports_that_its_file_is_gone(folder):
    async with open_gateway(folder, Keeping()) as gateway, client_of(gateway) as client:
        batch = await submit(client, jsonl(line(1)))
        await client.files.delete(batch.input_file_id)
        gateway.queue.keeps = False
        batch = await ended(client, batch.id)
        assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["file_not_found"])


@pytest.mark.parametrize("purpose", ["", "fine-tune", "x" * 64, "x" * 5000])
async def test_another_purpose_is_refused_by_name(folder, purpose):
    async with open_gateway(folder) as gateway:
        form = aiohttp.FormData({"purpose": purpose})
        form.add_field("file", b"x", filename="r.jsonl")
        async with gateway.http.post(gateway.url + "/v1/files", data=form) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "purpose")


async def test_a_form_with_a_broken_header_is_refused(folder):
    async with open_gateway(folder) as gateway:
        body = b'--b\r\nContent-Disposition: form-data; name="\x1b"\r\n\r\nx\r\n--b--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        status, answer = await gateway.post("/v1/files", body, headers=headers)
        assert (status, answer["error"]["code"]) == (400, "invalid_body")


async def test_a_batch_answers_every_line_in_order_and_in_the_lowest_lane(folder):
    lines = [line(number) for number in range(150)]
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        created = await submit(client, jsonl(*lines))
        assert (created.status, created.endpoint) == ("validating", CHAT)
        batch = await ended(client, created.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 150, 0)
        assert batch.error_file_id is None
        received = await answers(client, batch.output_file_id)
        assert [each["custom_id"] for each in received] == [f"line-{number}" for number in range(150)]
        for each in received:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["body"]["choices"][0]["message"]["content"] == "Hello world."
        assert len(gateway.worker.jobs) == 150
        assert all(job.is_batch for job in gateway.worker.jobs)
        assert [each.id async for each in client.batches.list()] == [created.id]
        _, listed = await gateway.get("/v1/batches")
        msgspec.convert(listed, openapi_answers.BatchList, strict=True)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at


async def test_a_line_that_runs_past_its_own_timeout_is_reported(folder):
    slow, other = line(0), line(1)
    slow["body"] = {**slow["body"], "timeout": 0.05}
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: speech(
            gateway.model, "Hello", end=None if job.deadline_s - job.submitted_at_s < 1 else EndReason.STOP
        )
        batch = await ended(client, (await submit(client, jsonl(slow, other))).id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
        (received,) = await answers(client, batch.error_file_id)
    assert (received["custom_id"], received["response"]["status_code"]) == ("line-0", 504)
    assert received["response"]["body"]["error"]["code"] == "deadline"


async def test_a_line_that_never_comes_to_its_end_is_given_up(folder):
    async with open_gateway(folder, request_timeout=1.0) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
        batch = await ended(client, (await submit(client, jsonl(line(0)))).id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 0, 1)
        assert len(gateway.worker.jobs) == progress.MAX_LATE == 3
        (received,) = await answers(client, batch.error_file_id)
    assert (received["custom_id"], received["response"]["status_code"]) == ("line-0", 504)
    error = received["response"]["body"]["error"]
    assert error["code"] == "deadline"
    assert error["message"].endswith("So it did each of the 3 times that it was asked.")


async def test_a_line_that_only_waited_is_asked_again(folder, monkeypatch):
    """A busy worker or a long queue does not make a request's refusal final."""
    monkeypatch.setattr(progress, "MAX_LATE", 1)
    async with open_gateway(folder, request_timeout=1.0) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: (
            Script(end=None) if len(gateway.worker.jobs) < 3 else speech(gateway.model, "Hello world.")
        )
        batch = await ended(client, (await submit(client, jsonl(line(0)))).id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 0)
        assert len(gateway.worker.jobs) == 3


async def test_a_line_that_the_queue_has_lost_is_asked_anew(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: (
            Script([], EndReason.LOST) if len(gateway.worker.jobs) < 2 else speech(gateway.model, "Hello world.")
        )
        batch = await ended(client, (await submit(client, jsonl(line(0)))).id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 0)


@pytest.mark.parametrize("route", ["/v1/files", "/v1/batches"])
async def test_a_key_that_would_not_be_honoured_is_refused(folder, route):
    async with open_gateway(folder) as gateway:
        status, answer = await gateway.post(route, {}, headers={"Idempotency-Key": "once"})
        assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def test_files_are_listed_in_the_requested_order(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        ids = [(await client.files.create(file=(name, b"{}"), purpose="batch")).id for name in "abc"]
        for order in ("asc", "desc"):
            listed = [each.id async for each in client.files.list(order=order)]
            assert listed == (ids if order == "asc" else ids[::-1])
        status, answer = await gateway.get("/v1/files?order=newest")
        assert (status, answer["error"]["param"]) == (400, "order")


async def test_lines_that_cannot_be_answered_are_in_the_error_file(folder):
    bad_wish = line(1)
    bad_wish["body"] = {**bad_wish["body"], "temperature": 99}
    stream = line(2)
    stream["body"] = {**stream["body"], "stream": True}
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: (
            Script([], EndReason.NUMERICAL_ERROR) if job.sampling.seed == 7 else speech(gateway.model, "Hello world.")
        )
        failing = line(3)
        failing["body"] = {**failing["body"], "seed": 7}
        batch = await ended(client, (await submit(client, jsonl(line(0), bad_wish, stream, failing))).id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 3)
        received = await answers(client, batch.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in received] == [
        ("line-1", 400),
        ("line-2", 400),
        ("line-3", 500),
    ]
    assert received[0]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\n\n", "contains no request"),
        (b"{", "not a JSON object"),
        (jsonl(line(1), line(1)), "earlier line"),
        (jsonl(line(1, method="GET")), "must be POST"),
        (jsonl(line(1, url="/v1/completions")), "the url"),
        (jsonl(line(1, extra=1)), "exactly"),
        (jsonl(line(1, custom_id="")), "custom_id"),
    ],
)
async def test_a_file_that_is_no_batch_fails_whole(folder, data, words):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        batch = await ended(client, (await submit(client, data)).id)
        assert batch.status == "failed"
        assert words in batch.errors.data[0].message
        assert gateway.worker.jobs == []


async def test_a_batch_that_meets_a_bug_fails_and_is_not_tried_for_ever(folder, monkeypatch):
    tries = []

    async def stumble(queue, file_id, scanner, pool):
        tries.append(file_id)
        raise RuntimeError("hush")

    monkeypatch.setattr(runner, "scan_file", stumble)
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        batch = await ended(client, (await submit(client, jsonl(line(1)))).id)
        assert await gateway.queue.batches.open_batches() == []
    assert (batch.status, batch.errors.data[0].code) == ("failed", "internal_error")
    assert "hush" not in batch.errors.data[0].message
    assert len(tries) == 1


async def test_a_bug_does_not_end_the_looking_for_batches(folder, caplog):
    queue = QuickQueue()
    list_batches = queue.batches.open_batches

    async def broken():
        queue.batches.open_batches = list_batches
        raise KeyError("a bug")

    queue.batches.open_batches = broken
    async with open_gateway(folder, queue) as gateway, client_of(gateway) as client:
        assert (await ended(client, (await submit(client, jsonl(line(1)))).id)).status == "completed"
    assert "a bug" in caplog.text


async def test_a_cancelled_batch_keeps_what_was_answered(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        scripts = iter([speech(gateway.model, "Hello world.")] * 3)
        gateway.worker.script = lambda job: next(scripts, Script([], None))
        created = await submit(client, jsonl(*(line(number) for number in range(100))))
        async with asyncio.timeout(20):
            while (await client.batches.retrieve(created.id)).request_counts.completed < 3:
                await asyncio.sleep(0.02)
        assert (await client.batches.cancel(created.id)).status == "cancelling"
        batch = await ended(client, created.id)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 3)
        assert batch.request_counts.failed == 97
        assert len(await answers(client, batch.output_file_id)) == 3
        received = await answers(client, batch.error_file_id)
        assert {each["error"]["code"] for each in received} == {"batch_cancelled"}
        await gateway.worker.cancelled(50)
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(created.id)


async def test_another_gateway_goes_on_where_one_died(folder, monkeypatch):
    monkeypatch.setattr(runner, "LEASE_S", 0.2)
    asked: list[str] = []
    queue = QuickQueue()
    async with open_gateway(folder, queue, drain_timeout=0.0) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: (
            asked.append(job.job_id) or Script(speech(gateway.model, "Hello world.").steps, EndReason.STOP, 0.05)
        )
        created = await submit(client, jsonl(*(line(number) for number in range(120))))
        async with asyncio.timeout(20):
            while (await client.batches.retrieve(created.id)).request_counts.completed < 10:
                await asyncio.sleep(0.02)
        first = next(task for task in asyncio.all_tasks() if "BatchRunner.run" in repr(task.get_coro()))
        first.cancel()
        settings = Settings(model=folder, served_model_name=MODEL, port=0, drain_timeout=0.2)
        async with serving(settings, gateway.model, MemoryGatewayQueue(queue.data)):
            batch = await ended(client, created.id)
        received = await answers(client, batch.output_file_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 120)
    assert len({each["custom_id"] for each in received}) == 120
    assert len(asked) == 120, "a line was asked twice"


async def test_what_is_anothers_is_not_there(folder):
    async with (
        open_gateway(folder, api_key=("one", "two")) as gateway,
        client_of(gateway, "one") as client,
        client_of(gateway, "two") as other,
    ):
        file = await client.files.create(file=("r.jsonl", jsonl(line(1))), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for asked in (
            other.files.retrieve(file.id),
            other.files.content(file.id),
            other.files.delete(file.id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        assert [each async for each in other.files.list()] == []
        assert [each async for each in other.batches.list()] == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"input_file_id": "file-nowhere"}, "input_file_id"),
        ({"input_file_id": "a/b:c"}, "input_file_id"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(folder, changes, param):
    async with open_gateway(folder) as gateway:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", jsonl(line(1)), filename="r.jsonl")
        async with gateway.http.post(gateway.url + "/v1/files", data=form) as response:
            file = await response.json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"} | changes
        status, answer = await gateway.post("/v1/batches", body)
        assert status in (400, 404)
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"purpose": "fine-tune", "file": b"x"}, 400),
        ({"purpose": "batch"}, 400),
        ({"file": b"x"}, 400),
        ({"purpose": "batch", "file": b"x" * 2000}, 413),
        ({"purpose": "batch", "file": b"x", "more": "y"}, 400),
        ({"purpose": "b" * 100, "file": b"x"}, 400),
    ],
)
async def test_an_upload_that_cannot_be_is_refused(folder, fields, status):
    async with open_gateway(folder, max_file_bytes=1024) as gateway:
        form = aiohttp.FormData()
        for name, value in fields.items():
            form.add_field(name, value, filename="r.jsonl" if name == "file" else None)
        if not form.is_multipart:
            form._is_multipart = True
        async with gateway.http.post(gateway.url + "/v1/files", data=form) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
