"""Queue ingress: requests that foreign producers write, answered on their reply streams."""

import asyncio
from dataclasses import replace

import msgpack
import pytest

from service.errors import EndReason
from service.queue import keys
from service.queue.codec import decode, encode
from service.queue.interface import QueueFull, QueueUnavailable
from service.queue.messages import Reply
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, QuickIngress, QuickQueue, open_gateway, speech
from tests.support.responses import CALL, WEATHER, write_tool_model

PRODUCER = "default"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"model": MODEL, "prompt": "the and"},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
}


class Ledger(QuickIngress):
    """Records which entries were settled; the first `settle_failures` calls fail."""

    def __init__(self, data):
        super().__init__(data)
        self.settled = []
        self.produced = []
        self.settle_failures = 0

    async def fetch_entries(self, producers, max_entries, wait_s):
        entries = await super().fetch_entries(producers, max_entries, wait_s)
        self.produced += entries
        return entries

    async def settle_entry(self, entry):
        if self.settle_failures:
            self.settle_failures -= 1
            raise QueueUnavailable("away")
        await super().settle_entry(entry)
        self.settled.append(entry.entry_id)


@pytest.fixture
async def ingress_gateway(model_folder):
    async with open_gateway(model_folder, QuickQueue(ingress=Ledger)) as opened:
        yield opened


def payload(name="job", endpoint=CHAT, **more):
    return msgpack.packb({"v": 1, "id": name, "endpoint": endpoint, "body": {**BODIES[endpoint], **more}})


async def answer(gateway, data, name="job", within_s=5.0, was_left=False):
    """All replies to one entry, once the last is there and the entry is settled."""
    num_settled = len(gateway.queue.ingress.settled)
    await gateway.queue.produce(PRODUCER, data, was_left)
    async with asyncio.timeout(within_s):
        while len(gateway.queue.ingress.settled) == num_settled:
            await asyncio.sleep(0.005)
    replies = [decode(Reply, reply) for reply in gateway.queue.replies(PRODUCER, name)]
    assert [reply.number for reply in replies] == list(range(1, len(replies) + 1))
    assert [reply.done for reply in replies] == [False] * (len(replies) - 1) + [True]
    return replies


@pytest.mark.parametrize("endpoint", BODIES)
async def test_one_final_reply(ingress_gateway, endpoint):
    (reply,) = await answer(ingress_gateway, payload(endpoint=endpoint))
    assert (reply.id, reply.text, reply.finish_reason, reply.error) == ("job", "Hello world.", "stop", None)
    assert reply.usage.completion_tokens == 8
    assert ingress_gateway.worker.jobs[0].tenant == "default"


@pytest.mark.parametrize("endpoint", BODIES)
async def test_a_requested_stream_gets_text_deltas(ingress_gateway, endpoint):
    replies = await answer(ingress_gateway, payload(endpoint=endpoint, stream=True))
    assert len(replies) > 2
    assert "".join(reply.text for reply in replies) == "Hello world."
    assert replies[-1].finish_reason == "stop"
    assert all(reply.usage is None for reply in replies[:-1])


async def test_a_reply_stream_with_foreign_entries_is_left_alone(ingress_gateway, caplog):
    ingress_gateway.queue.data.write_reply((PRODUCER, "job"), 1, b"no reply")
    num_settled = len(ingress_gateway.queue.ingress.settled)
    await ingress_gateway.queue.produce(PRODUCER, payload())
    async with asyncio.timeout(5):
        while len(ingress_gateway.queue.ingress.settled) == num_settled:
            await asyncio.sleep(0.005)
    (entry,) = ingress_gateway.queue.ingress.produced
    (reply,) = ingress_gateway.queue.replies(PRODUCER, entry.entry_id)
    assert decode(Reply, reply).error["code"] == "id_in_use"
    assert list(ingress_gateway.queue.replies(PRODUCER, "job")) == [b"no reply"]
    assert "bug" not in caplog.text


async def test_packed_prompt(ingress_gateway):
    data = payload(endpoint=COMPLETIONS, prompt=b"\x01\0\0\0\x02\0\0\0")
    assert (await answer(ingress_gateway, data))[0].usage.prompt_tokens == 2


async def test_long_text_comes_in_several_replies(ingress_gateway, monkeypatch):
    monkeypatch.setattr("service.gateway.ingress.replies.MAX_REPLY_CHARS", 5)
    replies = await answer(ingress_gateway, payload())
    assert [reply.text for reply in replies] == ["Hello", " worl", "d."]


@pytest.mark.parametrize(
    ("data", "name", "code", "param"),
    [
        (payload(temperature=3), "job", None, "temperature"),
        (payload(n=9), "job", None, "n"),
        (payload(bogus=1), "job", "unknown_field", "bogus"),
        (payload(model="other"), "job", "model_not_found", "model"),
        (payload(logprobs=True), "job", None, "logprobs"),
        (payload(return_token_ids=True), "job", None, "return_token_ids"),
        (payload(endpoint=COMPLETIONS, echo=True), "job", None, "echo"),
        (
            payload(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
            "job",
            None,
            "stream_options.continuous_usage_stats",
        ),
        (payload(endpoint=COMPLETIONS, prompt=[10**6]), "job", None, "prompt"),
        (payload(endpoint=COMPLETIONS, prompt=b"\x01\0\0"), "job", "invalid_message", None),
        (msgpack.packb({"v": 1, "id": "x", "endpoint": "/v1/embeddings", "body": {}}), "x", None, "endpoint"),
        (msgpack.packb({"v": 9, "id": "x", "endpoint": CHAT, "body": {}}), "x", "invalid_message", None),
        (msgpack.packb({"v": 1, "id": "x", "endpoint": CHAT, "body": []}), "x", "invalid_message", None),
        (msgpack.packb({"v": 1, "id": "x", "reply_to": "{quire}:jobs"}), "x", "invalid_message", None),
        (msgpack.packb({"id": "../../jobs"}), None, "invalid_message", None),
        (msgpack.packb({"id": 5}), None, "invalid_message", None),
        (msgpack.packb([1, 2]), None, "invalid_message", None),
        (b"", None, "invalid_message", None),
        (b"\xc1", None, "invalid_message", None),
        (b"\x91" * 100_000, None, "invalid_message", None),
        (b"\x81\xa1a" * 100_000, None, "invalid_message", None),
        (b"\xdd\xff\xff\xff\xff", None, "invalid_message", None),
        (b"\x81\xa2id\xc7\x05\x01abcde", None, "invalid_message", None),
        (b"a" * (2 << 20), None, "invalid_message", None),
    ],
)
async def test_bad_entries_get_one_error_and_are_settled(ingress_gateway, data, name, code, param):
    # An entry that names no job of its own is answered under the entry's id, which its producer got from XADD.
    (reply,) = await answer(ingress_gateway, data, name or "1-0")
    assert set(reply.error) <= {"message", "type", "param", "code"}
    assert (reply.error.get("code"), reply.error.get("param")) == (code, param)
    assert reply.usage is None
    assert ingress_gateway.worker.jobs == []
    assert (await answer(ingress_gateway, payload("next"), "next"))[0].text == "Hello world."


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "field m of the entry is missing or empty"),
        (payload() + b"\xc0", "not msgpack within the limits: bytes after the message"),
        (b"\x81\xa2id\xd6\xff\x00\x00\x00\x01", "not msgpack within the limits: an extension type"),
        (b"\x91" * 2000 + b"\xc0", "not msgpack within the limits: nested too deeply"),
    ],
)
async def test_a_broken_entry_gets_the_reason(ingress_gateway, data, why):
    (reply,) = await answer(ingress_gateway, data, "1-0")
    assert reply.error["message"] == f"The entry is not a valid job message: {why}."


async def test_an_entry_that_is_no_job_gets_the_reason_and_is_logged(ingress_gateway, caplog):
    caplog.set_level("INFO", "quire.gateway")
    (reply,) = await answer(ingress_gateway, msgpack.packb({"v": 9, "id": "x\x1b[31m"}), "1-0")
    assert reply.error["message"] == "The entry is not a valid job message: field v: this side speaks version 1."
    (message,) = [record.getMessage() for record in caplog.records if "ingress entry refused" in record.getMessage()]
    assert message == "ingress entry refused: field v: this side speaks version 1"


@pytest.mark.parametrize("end", [EndReason.INTERNAL, EndReason.TOO_LARGE, EndReason.NUMERICAL_ERROR])
async def test_jobs_that_fail(ingress_gateway, end):
    ingress_gateway.worker.script = lambda job: speech(ingress_gateway.model, "He", end=end)
    replies = await answer(ingress_gateway, payload(stream=True))
    assert replies[-1].error["code"] == end.value
    assert "".join(reply.text for reply in replies) == "He"


async def test_deadline(ingress_gateway):
    ingress_gateway.worker.script = lambda job: Script([], None)
    assert (await answer(ingress_gateway, payload(timeout=0.05)))[0].error["code"] == "deadline"
    assert (await ingress_gateway.worker.cancelled()).reason is EndReason.DEADLINE


async def test_many_at_once(ingress_gateway):
    ingress_gateway.worker.script = lambda job: speech(ingress_gateway.model, "Hello world.", step_s=0.005)
    for number in range(50):
        await ingress_gateway.queue.produce(PRODUCER, payload(f"job{number}"))
    async with asyncio.timeout(5):
        while len(ingress_gateway.queue.ingress.settled) < 50:
            await asyncio.sleep(0.01)
    for number in range(50):
        (reply,) = (decode(Reply, data) for data in ingress_gateway.queue.replies(PRODUCER, f"job{number}"))
        assert reply.text == "Hello world."


async def test_bounded_concurrency(model_folder, monkeypatch):
    monkeypatch.setattr("service.gateway.ingress.ingress.MAX_OPEN_JOBS", 3)
    async with open_gateway(model_folder, QuickQueue(ingress=Ledger)) as ingress_gateway:
        ingress_gateway.worker.script = lambda job: Script([], None)
        for number in range(10):
            await ingress_gateway.queue.produce(PRODUCER, payload(f"job{number}", timeout=0.1))
        while len(ingress_gateway.worker.jobs) < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        assert len(ingress_gateway.worker.jobs) == 3


async def test_a_full_queue_is_waited_for(ingress_gateway, monkeypatch):
    monkeypatch.setattr("service.gateway.core.back_pressure.RETRY_AFTER_S", 0.02)
    submit, num_refused = ingress_gateway.queue.submit, 0

    async def full_at_first(job, *bounds):
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise QueueFull(of_tenant=False, num_jobs=9, num_tokens=0)
        await submit(job, *bounds)

    monkeypatch.setattr(ingress_gateway.queue, "submit", full_at_first)
    assert (await answer(ingress_gateway, payload()))[0].text == "Hello world."
    assert num_refused == 3


async def test_settling_is_tried_again(ingress_gateway, monkeypatch):
    monkeypatch.setattr("service.gateway.ingress.replies.RETRY_S", 0.01)
    ingress_gateway.queue.ingress.settle_failures = 3
    (reply,) = await answer(ingress_gateway, payload())
    assert reply.text == "Hello world."


async def test_what_could_not_be_settled_is_fetched_again(model_folder, monkeypatch):
    monkeypatch.setattr(keys, "INGRESS_LEFT_S", 0.05)
    too_short_for_a_retry = {"request_timeout": 0.9}
    async with open_gateway(model_folder, QuickQueue(ingress=Ledger), **too_short_for_a_retry) as ingress_gateway:
        ingress_gateway.queue.ingress.settle_failures = 1
        (reply,) = await answer(ingress_gateway, payload())
        assert reply.text == "Hello world."
        assert [entry.was_left for entry in ingress_gateway.queue.ingress.produced] == [False, True]


async def test_what_a_drain_cuts_short_stays_unsettled_and_unanswered(model_folder):
    queue = QuickQueue(ingress=Ledger)
    async with open_gateway(model_folder, queue, drain_timeout=0.05) as ingress_gateway:
        ingress_gateway.worker.script = lambda job: Script([], None)
        await queue.produce(PRODUCER, payload())
        while not ingress_gateway.worker.jobs:
            await asyncio.sleep(0.005)
    assert queue.ingress.settled == []
    assert queue.replies(PRODUCER, "job") == ()


async def test_a_bug_costs_one_job_only(ingress_gateway, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr("service.gateway.core.served_model.ServedModel.encode", lambda *_, **__: 1 / 0)
        (reply,) = await answer(ingress_gateway, payload())
    assert reply.error["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert (await answer(ingress_gateway, payload("next"), "next"))[0].text == "Hello world."


async def test_what_a_dead_gateway_had_not_begun_is_answered(ingress_gateway):
    (reply,) = await answer(ingress_gateway, payload(), was_left=True)
    assert (reply.error, reply.done) == (None, True)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_dead_gateway_had_begun_goes_on_behind_its_last_reply(ingress_gateway, stream):
    begun = encode(Reply(id="job", number=1, text="Hello w"))
    ingress_gateway.queue.data.write_reply((PRODUCER, "job"), 1, begun)
    first, *more = await answer(ingress_gateway, payload(stream=stream), was_left=True)
    assert first.text == "Hello w"
    assert "".join(reply.text for reply in more) == "orld."
    assert (more[-1].finish_reason, more[-1].usage.completion_tokens) == ("stop", 8)


async def test_an_end_that_a_dead_gateway_sent_is_not_sent_again(ingress_gateway):
    for number, text in ((1, "Hello "), (2, "world.")):
        end = "stop" if number == 2 else None
        reply = Reply(id="job", number=number, index=0, text=text, finish_reason=end)
        ingress_gateway.queue.data.write_reply((PRODUCER, "job"), number, encode(reply))
    *_, last = replies = await answer(ingress_gateway, payload(n=2), was_left=True)
    assert [(reply.index, reply.text) for reply in replies[2:]] == [(1, "Hello world.")]
    assert (last.finish_reason, last.done) == ("stop", True)


async def test_the_next_gateway_goes_on_with_the_job_of_one_that_died(model_folder):
    data, forever = QueueData(), asyncio.Event()
    async with open_gateway(model_folder, QuickQueue(data, Ledger)) as first:
        steps = speech(first.model, "Hello world, here and there.").steps
        first.worker.script = lambda job: Script(steps, step_s=0.03)
        await first.queue.produce(PRODUCER, payload(stream=True))
        async with asyncio.timeout(5):
            while len(first.queue.replies(PRODUCER, "job")) < 3:
                await asyncio.sleep(0.005)
        first.queue.ingress.reply = first.queue.ingress.fetch_entries = lambda *_, **__: (
            forever.wait()
        )  # no word of it any more
        (entry,) = first.queue.ingress.produced
        async with open_gateway(model_folder, QuickQueue(data, Ledger)) as successor:
            data.ingress_of(PRODUCER).append(replace(entry, was_left=True))
            data.wake_waiters()
            async with asyncio.timeout(5):
                while not successor.queue.ingress.settled:
                    await asyncio.sleep(0.005)
            replies = [decode(Reply, reply) for reply in successor.queue.replies(PRODUCER, "job")]
            assert "".join(reply.text for reply in replies) == "Hello world, here and there."
            assert [reply.number for reply in replies] == list(range(1, len(replies) + 1))
            assert (replies[-1].done, replies[-1].error) == (True, None)
            assert (len(first.worker.jobs), successor.worker.jobs) == (1, [])
        forever.set()


async def test_what_a_dead_gateway_had_ended_is_settled_only(ingress_gateway):
    ingress_gateway.queue.data.write_reply((PRODUCER, "job"), 1, encode(Reply(id="job", number=1, done=True)))
    assert len(await answer(ingress_gateway, payload(), was_left=True)) == 1
    assert ingress_gateway.worker.jobs == []


async def test_what_another_gateway_has_taken_is_let_go_of(model_folder, monkeypatch, caplog):
    monkeypatch.setattr("service.gateway.ingress.ingress.INGRESS_KEEP_S", 0.05)
    async with open_gateway(model_folder, QuickQueue(ingress=Ledger)) as gateway:
        gateway.worker.script = lambda job: Script([], end=None)
        await gateway.queue.produce(PRODUCER, payload())
        async with asyncio.timeout(5):
            while not gateway.worker.jobs:
                await asyncio.sleep(0.005)
        (entry,) = gateway.queue.ingress.produced
        gateway.queue.ingress.renew_entries = lambda: _value([entry])
        async with asyncio.timeout(5):
            while "another gateway has taken" not in caplog.text:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert (gateway.worker.cancels, gateway.queue.ingress.settled) == ([], [])  # the job is the other's now


async def _value(value):
    return value


TOOL = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "description", "parameters")}}


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_come_whole_with_the_last_reply_of_their_choice(tmp_path, stream):
    async with open_gateway(write_tool_model(tmp_path / "model"), QuickQueue(ingress=Ledger)) as ingress_gateway:
        ingress_gateway.worker.script = lambda job: speech(ingress_gateway.model, CALL)
        replies = await answer(ingress_gateway, payload(tools=[TOOL], stream=stream))
        assert "".join(reply.text for reply in replies) == "I look."
        assert (len(replies) > 1) == stream
        assert [reply.tool_calls for reply in replies[:-1]] == [None] * (len(replies) - 1)
        (call,) = replies[-1].tool_calls
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert call["id"].startswith("call_")
        assert replies[-1].finish_reason == "tool_calls"
        (plain,) = await answer(ingress_gateway, payload("other", tools=[TOOL], tool_choice="none"), "other")
        assert (plain.tool_calls, plain.finish_reason) == (None, "stop")


async def test_calls_that_no_reply_could_hold_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("service.gateway.ingress.replies.MAX_REPLY_CHARS", 8)
    async with open_gateway(write_tool_model(tmp_path / "model"), QuickQueue(ingress=Ledger)) as ingress_gateway:
        ingress_gateway.worker.script = lambda job: speech(ingress_gateway.model, CALL)
        (reply,) = await answer(ingress_gateway, payload(tools=[TOOL]))
        assert reply.error["code"] == "reply_too_large"


async def test_calls_go_on_after_what_a_dead_gateway_sent(tmp_path):
    async with open_gateway(write_tool_model(tmp_path / "model"), QuickQueue(ingress=Ledger)) as ingress_gateway:
        ingress_gateway.worker.script = lambda job: speech(ingress_gateway.model, CALL)
        ingress_gateway.queue.data.write_reply((PRODUCER, "job"), 1, encode(Reply(id="job", number=1, text="I l")))
        first, *more = await answer(ingress_gateway, payload(tools=[TOOL], stream=True), was_left=True)
        assert first.text + "".join(reply.text for reply in more) == "I look."
        assert [call["function"]["name"] for call in more[-1].tool_calls] == ["weather"]
