"""Bytes of bodies in memory: in all, per client, of large bodies; and waiting."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import RequestError
from service.gateway.http import body_budget
from service.gateway.http.body_budget import SMALL_BYTES, BodyBudget

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(body_budget, "WAIT_S", 0.05)


async def refused(asked) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        await asked
    assert caught.value.retry_after_s
    return caught.value.status, caught.value.code


async def test_a_client_has_half_and_large_bodies_leave_a_quarter():
    budget = BodyBudget(8 * MIB)
    first, second, third = (budget.open_reservation(name) for name in "abc")
    await first.grow(4 * MIB)
    assert await refused(first.grow(1)) == (429, "too_many_body_bytes")
    await second.grow(2 * MIB)
    assert await refused(third.grow(SMALL_BYTES + 1)) == (503, "too_many_body_bytes")
    await third.grow(SMALL_BYTES)
    assert budget.num_bytes == 6 * MIB + SMALL_BYTES
    for hold in (first, second, third):
        hold.close()
        hold.close()
    assert budget.num_bytes == 0
    await third.grow(4 * MIB)


async def test_what_is_parsed_is_given_back_and_goes_to_who_waits(monkeypatch):
    monkeypatch.setattr(body_budget, "WAIT_S", 5.0)
    budget = BodyBudget(8 * MIB)
    first, second = budget.open_reservation("a"), budget.open_reservation("a")
    await first.grow(4 * MIB)
    waiting = asyncio.create_task(second.grow(2 * MIB))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.shrink(3 * MIB)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.shrink(1000)
    await waiting
    assert (first.num_bytes, second.num_bytes, budget.num_bytes) == (1000, 2 * MIB, 2 * MIB + 1000)


async def test_who_leaves_while_it_waits_holds_nothing():
    budget = BodyBudget(8 * MIB)
    first, second = budget.open_reservation("a"), budget.open_reservation("a")
    await first.grow(4 * MIB)
    waiting = asyncio.create_task(second.grow(MIB))
    await asyncio.sleep(0)
    first.close()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    second.close()
    assert budget.num_bytes == 0


async def test_small_ones_pass_large_ones_that_wait(monkeypatch):
    monkeypatch.setattr(body_budget, "WAIT_S", 5.0)
    budget = BodyBudget(8 * MIB)
    holds = [budget.open_reservation(name) for name in "abcd"]
    await holds[0].grow(4 * MIB)
    await holds[1].grow(2 * MIB)
    waiting = asyncio.create_task(holds[2].grow(MIB))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await holds[3].grow(1000)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
