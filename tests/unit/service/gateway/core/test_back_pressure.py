"""More than is worked off: whose requests wait, whose are refused, and what a refusal says."""

import asyncio
from contextlib import asynccontextmanager

import msgpack
import pytest

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.back_pressure import MAX_RETRY_AFTER_S, RETRY_AFTER_S, BackPressure
from service.gateway.core.fleet import FleetView
from service.queue.codec import decode
from service.queue.interface import QueueFull, QueueState
from service.queue.messages import Reply, WorkerCard
from tests.support.gateway import MODEL, open_gateway

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": [1, 2], "max_tokens": 8}  # counts for 10
SOON_S = 5.0


@asynccontextmanager
async def busy_gateway(model_folder, **settings):
    """No worker takes anything until it is let."""
    async with open_gateway(model_folder, api_key=("mine", "yours"), **settings) as gateway:
        gateway.worker.paused = True
        async with asyncio.timeout(SOON_S):
            while gateway.worker.is_fetching:
                await asyncio.sleep(0.01)
        yield gateway


async def send(gateway, key="mine", **more):
    """Status, error, Retry-After and how long it took, in ms."""
    start_s = asyncio.get_running_loop().time()
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.post(gateway.url + COMPLETIONS, json={**BODY, **more}, headers=headers) as response:
        answer = await response.json()
        elapsed_ms = (asyncio.get_running_loop().time() - start_s) * 1000
        return response.status, answer.get("error"), response.headers.get("Retry-After"), elapsed_ms


async def queued(gateway, number):
    async with asyncio.timeout(SOON_S):
        while (await gateway.queue.queue_state()).num_waiting < number:
            await asyncio.sleep(0.005)


async def test_a_tenant_has_a_share_of_the_queue(model_folder):
    async with busy_gateway(model_folder, max_waiting_tokens_per_tenant=25) as gateway:
        waiting = [asyncio.create_task(send(gateway)) for _ in range(2)]
        await queued(gateway, 2)
        status, error, retry_after, _ = await send(gateway)
        assert (status, error["code"], error["type"]) == (429, "queue_share_full", "rate_limit_error")
        assert "2 of your requests wait already, for up to 20 tokens" in error["message"]
        assert int(retry_after) >= 1
        others = asyncio.create_task(send(gateway, "yours"))
        await queued(gateway, 3)
        gateway.worker.paused = False
        assert [(await task)[0] for task in (*waiting, others)] == [200] * 3


@pytest.mark.parametrize(("settings", "number"), [({"max_waiting": 2}, 2), ({"max_waiting_tokens": 35}, 3)])
async def test_the_queue_is_bounded(model_folder, settings, number):
    async with busy_gateway(model_folder, **settings) as gateway:
        waiting = [asyncio.create_task(send(gateway, key)) for key in ("mine", "yours", "mine")[:number]]
        await queued(gateway, number)
        for key in ("mine", "yours"):
            status, error, retry_after, _ = await send(gateway, key)
            assert (status, error["code"]) == (503, "overloaded")
            assert f"{number} of all requests wait already" in error["message"]
            assert int(retry_after) >= 1
        gateway.worker.paused = False
        assert [(await task)[0] for task in waiting] == [200] * number
        await asyncio.sleep(0.3)  # a full queue is believed to be full for that long
        assert (await send(gateway))[0] == 200


async def test_a_flood_of_refusals_leaves_nothing_behind(model_folder):
    async with busy_gateway(model_folder, max_waiting=1) as gateway:
        waiting = asyncio.create_task(send(gateway))
        await queued(gateway, 1)
        answers = await asyncio.gather(*(send(gateway, resumable=number % 2 == 0) for number in range(40)))
        assert {status for status, *_ in answers} == {503}
        assert (await gateway.queue.queue_state()).num_waiting == 1
        data = gateway.queue.data
        async with asyncio.timeout(SOON_S):
            while len(data.requests._records) > 1:
                await asyncio.sleep(0.005)
        assert not data._tombstones
        gateway.worker.paused = False
        assert (await waiting)[0] == 200
        assert gateway.worker.cancels == []
        async with gateway.http.get(gateway.url + "/metrics", headers={"Authorization": "Bearer mine"}) as response:
            text = await response.text()
        assert 'quire:requests_ended_total{reason="cancelled"} 0.0' in text


async def test_several_prompts_are_refused_as_one(model_folder):
    async with busy_gateway(model_folder, max_waiting=2) as gateway:
        status, error, *_ = await send(gateway, prompt=[[1], [2], [3]])
        assert (status, error["code"]) == (503, "overloaded")
        async with asyncio.timeout(SOON_S):
            while (await gateway.queue.queue_state()).num_waiting:
                await asyncio.sleep(0.005)


async def test_a_refused_key_may_be_tried_again(model_folder):
    async with busy_gateway(model_folder, max_waiting=1) as gateway:
        waiting = asyncio.create_task(send(gateway))
        await queued(gateway, 1)
        headers = {"Authorization": "Bearer mine", "Idempotency-Key": "k"}
        assert (await gateway.post(COMPLETIONS, BODY, headers=headers))[0] == 503
        gateway.worker.paused = False
        assert (await waiting)[0] == 200
        async with asyncio.timeout(SOON_S):
            while (status := (await gateway.post(COMPLETIONS, BODY, headers=headers))[0]) == 503:
                await asyncio.sleep(0.05)
        assert status == 200


async def test_a_key_whose_first_gateway_died_before_it_queued_is_queued_by_the_next(model_folder, monkeypatch):
    async with open_gateway(model_folder) as gateway:
        submit = gateway.queue.submit

        async def dies(job, bounds):
            raise asyncio.CancelledError

        monkeypatch.setattr(gateway.queue, "submit", dies)
        headers = {"Idempotency-Key": "k"}
        assert (await gateway.post(COMPLETIONS, BODY, headers=headers))[0] == 503
        monkeypatch.setattr(gateway.queue, "submit", submit)
        status, answer = await gateway.post(COMPLETIONS, BODY, headers=headers)
        assert status == 200
        assert answer["id"] == f"cmpl-{gateway.worker.jobs[0].job_id}"


async def test_priorities_and_places(model_folder):
    async with busy_gateway(model_folder) as gateway:
        key = {"Authorization": "Bearer mine"}
        ids = []
        for priority in (0, 0, -3):
            body = {**BODY, "background": True, "priority": priority}
            status, state = await gateway.post(COMPLETIONS, body, headers=key)
            assert (status, state["status"]) == (202, "queued")
            ids.append(state["id"])
        places = [(await gateway.get(f"/v1/requests/{name}", headers=key))[1]["queue_position"] for name in ids]
        assert places == [1, 2, 0]
        gateway.worker.paused = False
        async with asyncio.timeout(SOON_S):
            while len(gateway.worker.jobs) < 3:
                await asyncio.sleep(0.005)
        assert [job.job_id for job in gateway.worker.jobs] == [ids[2], ids[0], ids[1]]
        assert (await gateway.get(f"/v1/requests/{ids[0]}", headers=key))[1]["queue_position"] is None


async def test_a_producer_waits_for_room(model_folder):
    async with busy_gateway(model_folder, max_waiting=1) as gateway:
        waiting = asyncio.create_task(send(gateway))
        await queued(gateway, 1)
        payload = {"v": 1, "id": "job", "endpoint": COMPLETIONS, "body": BODY}
        await gateway.queue.produce("default", msgpack.packb(payload))
        await asyncio.sleep(0.1)
        assert gateway.queue.replies("default", "job") == ()
        gateway.worker.paused = False
        assert (await waiting)[0] == 200
        async with asyncio.timeout(SOON_S):
            while not gateway.queue.replies("default", "job"):
                await asyncio.sleep(0.01)
        assert decode(Reply, gateway.queue.replies("default", "job")[-1]).finish_reason == "length"


def view_of(at_s, tokens):
    stats = {"prompt_tokens_total": tokens / 2, "generation_tokens_total": tokens / 2}
    card = WorkerCard(
        worker_id="w", model="m", ready=True, max_model_len=1, num_blocks=1, block_size=1, beat_at_s=at_s, stats=stats
    )
    return FleetView([card], QueueState({}, 1), at_s)


def test_when_to_come_again_follows_from_how_fast_the_fleet_is():
    pressure = BackPressure(Settings(), lambda: 0.0)

    def retry_after_s(num_tokens):
        full = QueueFull(of_tenant=True, num_jobs=3, num_tokens=num_tokens)
        return pressure.refused("t", full).retry_after_s

    assert retry_after_s(10_000) == RETRY_AFTER_S
    pressure.observe(view_of(100.0, 0))
    pressure.observe(view_of(104.0, 400))
    assert retry_after_s(10_000) == 10
    assert retry_after_s(10) == 1
    assert retry_after_s(10_000_000) == MAX_RETRY_AFTER_S
    pressure.observe(view_of(108.0, 0))  # a worker that started again
    assert retry_after_s(10_000) == 10


def test_a_full_queue_is_remembered_for_a_moment_and_then_one_goes_to_see():
    now_s = [0.0]
    pressure = BackPressure(Settings(), lambda: now_s[0])

    def status(tenant):
        try:
            pressure.check(tenant, 1)
        except RequestError as refused:
            return refused.status
        return 200

    assert status("a") == 200
    pressure.refused("a", QueueFull(of_tenant=True, num_jobs=1, num_tokens=2))
    assert (status("a"), status("b")) == (429, 200)
    now_s[0] = 0.3
    assert [status("a") for _ in range(3)] == [200, 429, 429]
    pressure.accepted("a")
    assert [status("a") for _ in range(3)] == [200] * 3
    pressure.refused("a", QueueFull(of_tenant=False, num_jobs=1, num_tokens=2))
    assert (status("a"), status("b")) == (503, 503)
    now_s[0] = 0.6
    assert [status(tenant) for tenant in "bab"] == [200, 503, 503]
