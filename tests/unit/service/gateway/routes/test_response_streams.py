"""Streams of `/v1/responses`: OpenAI's events in OpenAI's order, numbered, taken up again, and ending as they must."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from service.errors import EndReason
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, beside, open_gateway, speech
from tests.support.responses import CALL, RESPONSES, WEATHER, client_of, write_tool_model

HEAD = ["response.created", "response.in_progress"]
MESSAGE = [
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
]
FUNCTION_CALL = [
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tool_model(tmp_path_factory.mktemp("responses") / "model")


@pytest.fixture
async def served(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        yield gateway, client


async def events_of(stream) -> list:
    return [event async for event in stream]


def kinds_of(events) -> list[str]:
    """Return the kinds in order, an item's deltas as one."""
    kinds = []
    for event in events:
        if not (event.type.endswith(".delta") and kinds[-1] == event.type):
            kinds.append(event.type)
    return kinds


async def frames(gateway, path: str, **how) -> list[tuple[str, int, dict]]:
    """Return each event's name, id and data."""
    method = "POST" if "json" in how else "GET"
    async with gateway.http.request(method, gateway.url + path, **how) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = await response.text()
    read = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.strip().split("\n\n")]
    return [(frame["event"], int(frame["id"]), json.loads(frame["data"])) for frame in read]


async def test_a_text_comes_in_the_order_that_clients_know(served):
    _, client = served
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    assert kinds_of(events) == [*HEAD, *MESSAGE, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(event.delta for event in deltas) == "Hello world."
    final = events[-1].response
    assert final.output_text == "Hello world."
    assert {event.item_id for event in deltas} == {final.output[0].id}
    assert next(event.text for event in events if event.type == "response.output_text.done") == "Hello world."
    assert final.usage.output_tokens > 2
    assert await client.responses.retrieve(final.id) == final


async def test_the_clients_own_helper_puts_it_together(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, CALL)
    async with client.responses.stream(model=MODEL, input="Oslo?", tools=[WEATHER]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == '{"city": "Oslo"}'


async def test_calls_come_as_items_of_their_own(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, CALL)
    stream = await client.responses.create(model=MODEL, input="Oslo?", tools=[WEATHER], stream=True)
    events = await events_of(stream)
    assert kinds_of(events) == [*HEAD, *MESSAGE, *FUNCTION_CALL, "response.completed"]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == '{"city": "Oslo"}'
    assert {event.output_index for event in deltas} == {1}
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in added] == [
        ("message", "in_progress"),
        ("function_call", "in_progress"),
    ]
    assert done == events[-1].response.output
    assert added[1].call_id == done[1].call_id
    assert added[1].arguments == ""


async def test_logprobs_come_with_their_text(served):
    _, client = served
    events = await events_of(
        await client.responses.create(
            model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=1, stream=True
        )
    )
    logprobs = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    final = events[-1].response
    assert len(logprobs) == final.usage.output_tokens == len(final.output[0].content[0].logprobs)


async def test_an_answer_of_nothing_is_an_empty_message(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, "")
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    assert events[-1].response.output_text == ""
    assert [kind for kind in kinds_of(events) if "delta" not in kind] == [
        *HEAD,
        *(kind for kind in MESSAGE if "delta" not in kind),
        "response.completed",
    ]


async def test_what_is_cut_off_ends_as_incomplete(served):
    _, client = served
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


async def test_what_fails_on_the_way_ends_as_failed(served):
    gateway, client = served
    steps = speech(gateway.model, "Hello").steps[:1]
    gateway.worker.script = lambda job: Script(steps, EndReason.NUMERICAL_ERROR)
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "numerical_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (await client.responses.retrieve(events[0].response.id)).status == "failed"


async def test_what_is_refused_is_refused_before_any_event(served):
    _, client = served
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.responses.create(model=MODEL, input="Hi", max_output_tokens=100_000, stream=True)


async def test_a_client_that_leaves_ends_it(served):
    gateway, client = served
    speech_script = speech(gateway.model, "Hello")
    gateway.worker.script = lambda job: Script(speech_script.steps[:2], None)
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    assert (await gateway.worker.cancelled()).reason is EndReason.CANCELLED
    async with asyncio.timeout(10):
        while (await client.responses.retrieve(first.response.id)).status != "cancelled":
            await asyncio.sleep(0.01)


async def test_every_event_has_its_name_and_number(served):
    gateway, _ = served
    frames_sent = await frames(gateway, RESPONSES, json={"model": MODEL, "input": "Hi", "stream": True})
    assert all(name == data["type"] for name, _, data in frames_sent)
    assert all(number == data["sequence_number"] + 1 for _, number, data in frames_sent)


async def test_a_stream_is_taken_up_again_at_any_gateway(served, folder):
    gateway, client = served
    started = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    events = await events_of(started)
    assert kinds_of(events) == [*HEAD, *MESSAGE, "response.completed"]
    name = events[0].response.id
    async with beside(gateway, folder) as second, client_of(second) as other:
        for after in (0, 3, len(events) - 2):
            again = await events_of(await other.responses.retrieve(name, stream=True, starting_after=after))
            assert again == events[after + 1 :]
        frames_sent = await frames(
            second, f"{RESPONSES}/{name}", params={"stream": "true"}, headers={"Last-Event-ID": "4"}
        )
        assert [number for _, number, _ in frames_sent] == list(range(5, len(events) + 1))
    assert (await client.responses.retrieve(name)).status == "completed"


async def test_a_stream_that_was_left_goes_on_in_the_background(served):
    gateway, client = served
    gateway.worker.paused = True
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    gateway.worker.paused = False
    async with asyncio.timeout(10):
        while (answer := await client.responses.retrieve(first.response.id)).status != "completed":
            await asyncio.sleep(0.01)
    assert answer.output_text == "Hello world."


async def test_a_cancelled_response_ends_its_streams(served):
    gateway, client = served
    speech_script = speech(gateway.model, "Hello")
    gateway.worker.script = lambda job: Script(speech_script.steps[:2], None)
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    events = aiter(stream)
    first = await anext(events)
    while (await anext(events)).type != "response.output_text.delta":
        pass
    assert (await client.responses.cancel(first.response.id)).status == "cancelled"
    last = [event async for event in events][-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
