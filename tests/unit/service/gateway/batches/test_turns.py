"""The order of batches and of their lines."""

from __future__ import annotations

import asyncio

from service.gateway.batches.turns import (
    MAX_BATCHES,
    MAX_BATCHES_PER_TENANT,
    MAX_LINE_BYTES_IN_FLIGHT,
    BatchTurns,
    LineSlots,
)
from service.queue.records import OpenBatch


def taken(turns: BatchTurns, waiting: list[OpenBatch], running: list[str]) -> list[str]:
    found = []
    for batch in turns.next_batches(waiting, running):
        turns.record_start(batch)
        running.append(batch.tenant)
        found.append(batch.batch_id)
    return found


def waiting(*names: str) -> list[OpenBatch]:
    return [OpenBatch(name, name[0]) for name in names]


def test_tenants_take_turns_and_none_has_more_than_two():
    many = [f"a{number}" for number in range(30)]
    assert taken(BatchTurns(), waiting(*many), []) == ["a0", "a1"]
    assert taken(BatchTurns(), waiting(*many, "b0", "b1", "b2"), []) == ["a0", "b0", "a1", "b1"]
    assert taken(BatchTurns(), waiting(*many, "b0", "c0", "d0", "e0"), []) == ["a0", "b0", "c0", "d0"]
    assert MAX_BATCHES == 2 * MAX_BATCHES_PER_TENANT == 4


def test_who_had_a_turn_waits_for_the_others():
    turns, left = BatchTurns(), waiting("a0", "a1", "b0", "b1", "c0", "c1")
    running = ["x", "x", "x"]
    order = []
    while left:
        (name,) = taken(turns, left, running)
        order.append(name)
        left = [batch for batch in left if batch.batch_id != name]
        running.pop()
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]


async def test_lines_are_bounded_and_batches_take_turns():
    slots, order = LineSlots(num_lines=2), []

    async def batch(name: str) -> None:
        for _ in range(4):
            await slots.acquire(10)
            order.append(name)
            asyncio.get_running_loop().call_later(0.002, slots.release, 10)

    await asyncio.gather(batch("a"), batch("b"))
    assert sorted(order[2:6]) == ["a", "a", "b", "b"]


async def test_long_lines_wait_for_room():
    slots = LineSlots(num_bytes=MAX_LINE_BYTES_IN_FLIGHT)
    await slots.acquire(10 * MAX_LINE_BYTES_IN_FLIGHT)
    waits = asyncio.create_task(slots.acquire(1))
    await asyncio.sleep(0.01)
    assert not waits.done()
    slots.release(10 * MAX_LINE_BYTES_IN_FLIGHT)
    await waits
