"""A tenant with a full quota gets refusals over HTTP and can free room; other tenants continue."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from service.gateway.batches import finish, progress, runner
from service.queue.interface import QueueUnavailable
from tests.support.gateway import MODEL, QuickQueue, open_gateway
from tests.unit.service.gateway.batches.test_batches import CHAT, answers, client_of, ended, jsonl, line, submit

KIB = 1 << 10
ONE, TWO = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
QUOTA = {"max_stored_bytes_per_tenant": 64 * KIB, "api_key": ("one", "two")}
RESPONSES = "/v1/responses"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(progress, "RETRY_S", 0.05)
    monkeypatch.setattr(runner, "POLL_INTERVAL_S", 0.1)


async def upload(gateway, size: int, who: dict, purpose: str = "batch") -> tuple[int, dict, str | None]:
    form = aiohttp.FormData({"purpose": purpose})
    form.add_field("file", b"x" * size, filename="f.jsonl")
    async with gateway.http.post(gateway.url + "/v1/files", data=form, **who) as response:
        return response.status, await response.json(), response.headers.get("Retry-After")


@pytest.mark.parametrize("is_freed_by", ["delete", "nothing"])
async def test_files_are_bounded_in_bytes(model_folder, is_freed_by):
    async with open_gateway(model_folder, **QUOTA) as gateway:
        status, first, _ = await upload(gateway, 40 * KIB, ONE)
        assert status == 200
        status, received, retry_after = await upload(gateway, 40 * KIB, ONE)
        assert (status, received["error"]["code"], received["error"]["type"]) == (
            429,
            "storage_quota_exceeded",
            "rate_limit_error",
        )
        assert retry_after
        for word in ("files", str(64 * KIB), "delete"):
            assert word in received["error"]["message"]
        assert (await upload(gateway, 40 * KIB, TWO))[0] == 200, "others go on"
        if is_freed_by == "delete":
            async with gateway.http.delete(f"{gateway.url}/v1/files/{first['id']}", **ONE) as response:
                assert response.status == 200
        status, _, _ = await upload(gateway, 40 * KIB, ONE)
        assert status == (200 if is_freed_by == "delete" else 429)


async def test_an_upload_that_breaks_off_leaves_nothing(model_folder):
    async with open_gateway(model_folder, **QUOTA, max_file_bytes=50 * KIB) as gateway:
        for _ in range(3):
            assert (await upload(gateway, 40 * KIB, ONE, purpose="none"))[0] == 400
            assert (await upload(gateway, 51 * KIB, ONE))[0] == 413
        assert (await upload(gateway, 50 * KIB, ONE))[0] == 200
        assert len(gateway.queue.data.batch_data.pieces) == 1


async def test_responses_are_bounded_in_bytes_and_need_not_be_stored(model_folder):
    body = {"model": MODEL, "input": "x", "metadata": {"k": "v" * 512}}
    async with open_gateway(model_folder, **QUOTA) as gateway:
        made = []
        for _ in range(100):
            status, answer = await gateway.post(RESPONSES, body, **ONE)
            if status != 200:
                break
            made.append(answer["id"])
        assert (status, answer["error"]["code"]) == (429, "storage_quota_exceeded")
        assert 10 < len(made) < 60
        for how in ({"stream": True}, {"background": True}):
            status, answer = await gateway.post(RESPONSES, {**body, **how}, **ONE)
            assert (status, answer["error"]["code"]) == (429, "storage_quota_exceeded")
        assert (await gateway.post(RESPONSES, {**body, "store": False}, **ONE))[0] == 200
        assert (await gateway.post(RESPONSES, body, **TWO))[0] == 200
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await gateway.post(CHAT, chat, **ONE))[0] == 200
        for name in made[:2]:
            async with gateway.http.delete(f"{gateway.url}{RESPONSES}/{name}", **ONE) as response:
                assert response.status == 200
        assert (await gateway.post(RESPONSES, body, **ONE))[0] == 200


async def test_of_items_only_what_the_model_is_shown_is_stored(model_folder):
    part = {"type": "output_text", "text": "Hello", "annotations": [{"a": "y" * 1000}], "logprobs": [{"b": "y" * 1000}]}
    items = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "x"}]
    async with open_gateway(model_folder) as gateway:
        status, answer = await gateway.post(RESPONSES, {"model": MODEL, "input": items})
        assert status == 200
        _, listed = await gateway.get(f"{RESPONSES}/{answer['id']}/input_items?order=asc")
        kept = listed["data"][0]["content"]
        assert kept == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": "x", "id": "i" * 300}, "input[0].id"),
        ({"role": "user", "content": "x", "status": "s" * 300}, "input[0].status"),
        ({"type": "function_call", "call_id": "c" * 300, "name": "f", "arguments": "{}"}, "input[0].call_id"),
    ],
)
async def test_what_costs_no_token_has_a_length(model_folder, item, param):
    async with open_gateway(model_folder) as gateway:
        status, answer = await gateway.post(RESPONSES, {"model": MODEL, "input": [item]})
        assert (status, answer["error"]["param"]) == (400, param)


async def test_records_of_requests_that_stay_are_bounded_in_bytes(model_folder):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "user": "u" * 500}
    async with open_gateway(model_folder, **QUOTA) as gateway:
        for number in range(100):
            key = {"headers": {**ONE["headers"], "Idempotency-Key": f"key-{number}"}}
            status, answer = await gateway.post(CHAT, body, **key)
            if status != 200:
                break
        assert (status, answer["error"]["code"]) == (429, "storage_quota_exceeded")
        assert 5 < number < 60
        key["headers"]["Idempotency-Key"] = "key-0"
        assert (await gateway.post(CHAT, body, **key))[0] == 200, "it is there already"
        for how in ({"background": True}, {"resumable": True}):
            assert (await gateway.post(CHAT, {**body, **how}, **ONE))[0] == 429
        status, answer = await gateway.post(CHAT, body, **ONE)
        assert status == 200, "a request that ends with its client needs no record"
        assert (await gateway.post(CHAT, {**body, "background": True}, **TWO))[0] == 202


async def test_a_batch_that_finds_no_room_fails_by_name_and_keeps_what_it_has(model_folder):
    lines = [line(number) for number in range(60)]
    async with open_gateway(model_folder, **QUOTA) as gateway, client_of(gateway, "one") as client:
        batch = await ended(client, (await submit(client, jsonl(*lines))).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_quota_exceeded")
        done, left = batch.request_counts.completed, batch.request_counts.failed
        assert done + left == 60
        assert done > 0
        assert len(await answers(client, batch.output_file_id)) == done
        undone = await answers(client, batch.error_file_id)
        assert {each["error"]["code"] for each in undone} == {"storage_quota_exceeded"}
        assert (await gateway.queue.batches.open_batches()) == []
        for each in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            await client.files.delete(each)
        again = await ended(client, (await submit(client, jsonl(*lines[:5]))).id)
        assert again.status == "completed"


def queue_without_runner() -> QuickQueue:
    """No gateway gets to work on a batch."""
    queue = QuickQueue()

    async def refuse(batch_id, holder, for_s):
        return False

    queue.batches.hold_batch = refuse
    return queue


async def test_more_batches_than_may_be_open_are_refused(model_folder, monkeypatch):
    monkeypatch.setattr("service.gateway.batches.batches.MAX_OPEN_BATCHES", 3)

    async with open_gateway(model_folder, queue_without_runner(), api_key=("one", "two")) as gateway:
        async with client_of(gateway, "one") as client:
            first = await submit(client, jsonl(line(1)))
        body = {"input_file_id": first.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
        states = [(await gateway.post("/v1/batches", body, **ONE))[0] for _ in range(4)]
        assert states == [200, 200, 429, 429]
        async with client_of(gateway, "two") as other:
            await submit(other, jsonl(line(1)))


async def test_a_waiting_batch_reports_that_it_is_cancelled(model_folder):
    async with open_gateway(model_folder, queue_without_runner()) as gateway, client_of(gateway) as client:
        batch = await submit(client, jsonl(line(1)))
        assert (await client.batches.retrieve(batch.id)).status == "validating"
        await client.batches.cancel(batch.id)
        assert (await client.batches.retrieve(batch.id)).status == "cancelling"


async def test_a_full_queue_memory_is_reported_with_503(model_folder):
    async with open_gateway(model_folder, api_key=("one",), queue_memory_share=0.5) as gateway:
        gateway.queue.data.batch_data.ledger.max_memory_bytes = 64 * KIB
        status, received, retry_after = await upload(gateway, 40 * KIB, ONE)
        assert (status, received["error"]["code"]) == (503, "storage_full")
        assert retry_after
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "background": True}
        assert (await gateway.post(CHAT, chat, **ONE))[0] == 202


async def test_answers_go_on_to_their_files_where_a_gateway_stopped(model_folder, monkeypatch):
    monkeypatch.setattr(finish, "LINES_AT_ONCE", 7)

    queue = QuickQueue()
    move_lines = queue.batches.move_lines

    async def move_and_fail(batch, move):
        moved = await move_lines(batch, move)
        if move.past < batch.num_total:
            raise QueueUnavailable("away")
        return moved

    queue.batches.move_lines = move_and_fail
    async with open_gateway(model_folder, queue) as gateway, client_of(gateway) as client:
        batch = await ended(client, (await submit(client, jsonl(*(line(number) for number in range(40))))).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        received = await answers(client, batch.output_file_id)
        assert [each["custom_id"] for each in received] == [f"line-{number}" for number in range(40)]
        file = await client.files.retrieve(batch.output_file_id)
        assert file.bytes == len((await client.files.content(batch.output_file_id)).content)
        assert len(gateway.worker.jobs) == 40
        batch_data = gateway.queue.data.batch_data
        sizes = {name: batch_data.ledger.taken("anonymous", name) for name in (file.id, f"{batch.id}.lines")}
        assert sizes == {file.id: file.bytes + 512, f"{batch.id}.lines": 0}


async def test_a_file_that_is_deleted_while_it_is_read_breaks_its_download_off(model_folder):
    queue = QuickQueue()
    file_pieces = queue.batches.file_pieces

    async def first_piece_only(file_id, first, count):
        return [] if first else await file_pieces(file_id, first, count)

    queue.batches.file_pieces = first_piece_only
    async with open_gateway(model_folder, queue) as gateway:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"x" * 600 * KIB, filename="f")
        async with gateway.http.post(gateway.url + "/v1/files", data=form) as response:
            file = await response.json()
        assert file["bytes"] == 600 * KIB
        with pytest.raises(aiohttp.ClientPayloadError):
            async with gateway.http.get(f"{gateway.url}/v1/files/{file['id']}/content") as response:
                await response.read()


async def test_bodies_beyond_the_share_of_a_client_wait_and_get_a_retry_after(model_folder, monkeypatch):
    monkeypatch.setattr("service.gateway.http.body_budget.WAIT_S", 0.2)
    settings = {"max_body_bytes_in_flight": 1 << 20, "max_body_bytes": 512 * KIB, "api_key": ("one", "two")}
    async with open_gateway(model_folder, **settings) as gateway:
        stuck = asyncio.Event()

        async def slow():
            yield b"{" + b" " * 400 * KIB
            await stuck.wait()
            yield b"}"

        async def post_slowly() -> int:
            head = {**ONE["headers"], "Content-Type": "application/json", "Content-Length": str(2 + 400 * KIB)}
            async with gateway.http.post(gateway.url + CHAT, data=slow(), headers=head) as response:
                return response.status

        first = asyncio.create_task(post_slowly())
        await asyncio.sleep(0.1)
        status, answer = await gateway.post(CHAT, b" " * 200 * KIB, **ONE)
        assert (status, answer["error"]["code"]) == (429, "too_many_body_bytes")
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await gateway.post(CHAT, chat, **TWO))[0] == 200
        stuck.set()
        assert await first == 400
        assert (await gateway.post(CHAT, chat, **ONE))[0] == 200
