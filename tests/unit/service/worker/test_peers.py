"""Checks of other workers' cards: a worker of another model is waited for, then refused."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from service.errors import StartupError
from service.queue.interface import QueueUnavailable
from service.queue.messages import WorkerCard
from service.worker import peers
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.queue.worker import MemoryWorkerQueue

OTHER = WorkerCard(
    worker_id="host-1", model="a", ready=True, max_model_len=64, num_blocks=4, block_size=16, beat_at_s=0.0,
    weight_format="fp8",
)  # fmt: skip


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(peers, "LOOK_S", 0.01)
    return QueueData()


@pytest.fixture
async def queue(data):
    await MemoryWorkerQueue(data).announce(OTHER)
    return MemoryWorkerQueue(data)


async def test_a_worker_of_another_model_does_not_start(queue, data, monkeypatch):
    monkeypatch.setattr(peers, "CARD_LATE_S", 0.05)

    async def beat():
        while True:
            await MemoryWorkerQueue(data).announce(OTHER)
            await asyncio.sleep(0.01)

    beats = asyncio.create_task(beat())
    await peers.require_one_model(queue, "a")
    with pytest.raises(StartupError, match=r"'b', but worker host-1 of this Redis serves 'a'"):
        await peers.require_one_model(queue, "b")
    beats.cancel()


@pytest.mark.parametrize("changed", [{"ready": False}, {"beat_at_s": time.time() - 60}])
async def test_a_worker_that_leaves_or_died_makes_room_for_another_model(queue, data, changed):
    data.cards["host-1"] = replace(data.cards["host-1"], **changed)
    await peers.require_one_model(queue, "b")


async def test_a_redis_that_goes_away_is_named(queue, monkeypatch):
    async def away():
        raise QueueUnavailable("no answer in time")

    monkeypatch.setattr(queue, "workers", away)
    with pytest.raises(StartupError, match=r"^--redis-url: no answer in time"):
        await peers.require_one_model(queue, "a")


async def test_workers_whose_tokens_differ_are_logged(queue, caplog):
    ours = replace(OTHER, worker_id="host-2")
    await peers.log_differences(queue, ours)
    assert not caplog.records
    await peers.log_differences(queue, replace(ours, weight_format="bfloat16"))
    assert "worker=host-1 weight_format=fp8 own_weight_format=bfloat16" in caplog.text
