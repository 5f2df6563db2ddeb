"""Streams of `AsyncLLM` on the demo model."""

from __future__ import annotations

import asyncio
from itertools import count, pairwise

import pytest

from service.offline.api import AsyncLLM, RequestOutputKind, SamplingParams

START = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    with AsyncLLM(max_model_len=128) as made:
        yield made


async def collect(stream):
    return [output async for output in stream]


def params(**values):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, **values})


async def test_streams_grow_or_come_in_pieces_or_once(llm):
    whole, pieces, last = await asyncio.gather(
        collect(llm.generate(START, params(), "a")),
        collect(llm.generate(START, params(output_kind=RequestOutputKind.DELTA, logprobs=0), "b")),
        collect(llm.generate(START, params(output_kind=RequestOutputKind.FINAL_ONLY))),
    )
    final = whole[-1].outputs[0]
    assert len(whole) > 2
    assert [each.finished for each in whole] == [False] * (len(whole) - 1) + [True]
    assert all(after.outputs[0].text.startswith(before.outputs[0].text) for before, after in pairwise(whole))
    assert "".join(each.outputs[0].text for each in pieces) == final.text
    assert [token for each in pieces for token in each.outputs[0].token_ids] == final.token_ids
    assert sum(len(each.outputs[0].logprobs) for each in pieces) == 24
    assert [each.outputs[0].text for each in last] == [final.text]
    assert whole[0].request_id == "a"


async def test_leaving_or_aborting_ends_the_request(llm):
    stream = llm.generate(START, params(max_tokens=100), "left")
    await anext(stream)
    await stream.aclose()
    assert not llm._engine._open
    long = asyncio.create_task(collect(llm.generate(START, params(max_tokens=100), "aborted")))
    while "aborted" not in llm._engine._open:
        await asyncio.sleep(0.001)
    await llm.abort("aborted")
    await llm.abort("unknown")
    assert not any(each.finished for each in await long)
    stream = llm.generate(START, params(max_tokens=100), "twice")
    await anext(stream)
    with pytest.raises(ValueError, match="twice"):
        await anext(llm.generate(START, params(), "twice"))
    assert not (await anext(stream)).finished  # the first goes on
    await stream.aclose()


async def test_stop_strings_and_vectors(llm):
    found = (await collect(llm.generate(START, params(stop=["."], max_tokens=90))))[-1].outputs[0]
    assert (found.stop_reason, found.finish_reason) == (".", "stop")
    ((pooled,),) = [await collect(llm.encode(START))]
    assert pooled.outputs.data @ pooled.outputs.data == pytest.approx(1.0, abs=1e-5)
    await llm.check_health()


async def test_a_dead_engine_ends_its_streams(monkeypatch):
    async with AsyncLLM(max_model_len=64) as llm:
        engine, steps = llm._engine._thread._engine, count()
        step = engine.step

        def die_at_the_third():
            if next(steps) == 2:
                raise MemoryError("no more")
            step()

        monkeypatch.setattr(engine, "step", die_at_the_third)
        stream = llm.generate(START, params(max_tokens=40))
        await anext(stream)
        assert llm._engine._thread.join(60)  # the loop is blocked: its last outputs and its death arrive in one wake
        with pytest.raises(RuntimeError, match="died"):
            await collect(stream)
        with pytest.raises(RuntimeError, match="died"):
            await llm.check_health()
