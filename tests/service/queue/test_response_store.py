"""Responses, in memory and on Redis alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from service.queue.records import StoredResponse

RECORD = StoredResponse(
    response_id="resp_1",
    tenant="t",
    created_s=100.5,
    answer={"status": "queued", "output": []},
    context=[{"type": "message", "content": [{"text": "é"}]}],
    input=[{"type": "function_call_output", "output": "x" * 9000}],
)
ANSWERED = replace(RECORD, answer={"status": "completed", "output": [{"text": "\U0001f98a"}]})


async def test_a_record_comes_back_whole(queue):
    await queue.responses.put_response(RECORD, 60)
    assert await queue.responses.get_response("resp_1") == RECORD
    assert not RECORD.is_settled
    await queue.responses.settle_response(ANSWERED, 60)
    assert await queue.responses.get_response("resp_1") == ANSWERED
    assert ANSWERED.is_settled
    assert await queue.responses.get_response("resp_2") is None


async def test_what_was_dropped_stays_away(queue):
    await queue.responses.put_response(RECORD, 60)
    await queue.responses.drop_response(RECORD)
    await queue.responses.settle_response(ANSWERED, 60)
    assert await queue.responses.get_response("resp_1") is None
    await queue.responses.drop_response(RECORD)


async def test_a_record_is_kept_for_the_given_time(queue):
    await queue.responses.put_response(RECORD, 0.05)
    async with asyncio.timeout(10):
        while await queue.responses.get_response("resp_1") is not None:
            await asyncio.sleep(0.01)
    await queue.responses.put_response(RECORD, 0.5)
    await queue.responses.settle_response(ANSWERED, 60)
    await asyncio.sleep(0.6)
    assert await queue.responses.get_response("resp_1") == ANSWERED


@pytest.mark.parametrize("name", ["a/b", "", "x" * 200, "a:b", "{a}"])
async def test_an_id_that_no_key_may_hold_is_refused(queue, name):
    with pytest.raises(ValueError, match="Redis key"):
        await queue.responses.get_response(name)
