"""Completions and chats that are refused, fail on the way, or are cut off: by whom, when, and in which words."""

import json

import aiohttp
import openai
import pytest

from service.errors import ENDINGS, EndReason
from service.queue.interface import QueueUnavailable
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MAX_POSITION, MODEL, VOCAB_PADDING, QuickQueue, open_gateway, speech

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


PROMPT = {"model": MODEL, "prompt": "the and"}


MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("end", [end for end in EndReason if ENDINGS[end].finish_reason is None])
async def test_jobs_that_fail(gateway, end):
    gateway.worker.script = lambda job: Script([], end)
    for body in (MESSAGES, {**MESSAGES, "stream": True}):
        async with gateway.http.post(gateway.url + CHAT, json=body) as response:
            status, answer = response.status, await response.json()
            assert ("Retry-After" in response.headers) == (status == 503)
        assert status == ENDINGS[end].status
        assert answer["error"]["message"] == ENDINGS[end].message
        assert answer["error"]["code"] == end.value


@pytest.mark.parametrize(("path", "body"), [(CHAT, MESSAGES), ("/v1/responses", {"model": MODEL, "input": "hi"})])
async def test_what_fails_once_accepted_is_known_by_its_id(gateway, path, body):
    """Clients report this id, and logs have it."""
    gateway.worker.script = lambda job: Script([], EndReason.NUMERICAL_ERROR)
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="-", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.post(path.removeprefix("/v1"), body=body, cast_to=object)
    assert failed.value.request_id == gateway.worker.jobs[0].job_id
    async with gateway.http.post(gateway.url + path, json={**body, "model": "other"}) as response:
        assert (response.status, response.headers.get("X-Request-Id")) == (404, None)


async def test_failure_after_the_first_text_is_the_last_event(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=EndReason.INTERNAL)
    events = await gateway.events(CHAT, MESSAGES)
    assert json.loads(events[-1])["error"]["code"] == "internal"
    assert "[DONE]" not in events


async def test_deadline(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    status, answer = await gateway.post(CHAT, {**MESSAGES, "timeout": 0.05})
    assert (status, answer["error"]["code"]) == (504, "deadline")
    events = await gateway.events(CHAT, {**MESSAGES, "timeout": 0.05})
    assert json.loads(events[-1])["error"]["code"] == "deadline"
    assert {(await gateway.worker.cancelled(n)).reason for n in (1, 2)} == {EndReason.DEADLINE}
    status, answer = await gateway.post(CHAT, {**MESSAGES, "timeout": 601})
    assert (status, answer["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize(
    ("path", "change", "param", "code"),
    [
        (COMPLETIONS, {"prompt": [10**6]}, "prompt", None),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", None),
        (COMPLETIONS, {"prompt": [5279552648203111001]}, "prompt", None),
        (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids", None),
        (COMPLETIONS, {"stop_token_ids": [-1]}, "stop_token_ids", None),
        (COMPLETIONS, {"logit_bias": {"1000000": 1}}, "logit_bias", None),
        (COMPLETIONS, {"max_tokens": MAX_POSITION}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [1] * MAX_POSITION}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a" * 500_000}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a " * 600}, "prompt", "context_length_exceeded"),
        (CHAT, {"max_tokens": MAX_POSITION}, "messages", "context_length_exceeded"),
        (CHAT, {"min_tokens": MAX_POSITION}, "messages", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 500_000}]}, "messages", "context_length_exceeded"),
    ],
)
async def test_refused_by_the_model(gateway, path, change, param, code):
    status, answer = await gateway.post(path, {**(PROMPT if path == COMPLETIONS else MESSAGES), **change})
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == code
    assert gateway.worker.jobs == []


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({"max_tokens": MAX_POSITION}, f"the request asks for {MAX_POSITION + 3}: 3 in the prompt and {MAX_POSITION} "),
        ({"prompt": [1] * MAX_POSITION, "max_tokens": 1}, f"the request asks for {MAX_POSITION + 1}: {MAX_POSITION} "),
        ({"prompt": "a" * 500_000}, "the prompt is longer."),
    ],
)
async def test_a_request_above_the_context_is_counted(gateway, change, asked):
    """The first words are OpenAI's, by which clients find this error."""
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, **change})
    words = f"This model's maximum context length is {MAX_POSITION} tokens; {asked}"
    assert answer["error"]["message"].startswith(words)


async def test_token_ids_are_held_against_the_logits(gateway):
    last = gateway.model.vocab_size - 1
    assert last == gateway.model.tokenizer.vocab_size + VOCAB_PADDING - 1
    assert (await gateway.post(COMPLETIONS, {**PROMPT, "prompt": [0, last]}))[0] == 200
    assert (await gateway.post(COMPLETIONS, {**PROMPT, "prompt": [0, last + 1]}))[0] == 400


async def test_the_shortest_worker_bounds_the_context(model_folder):
    async with open_gateway(model_folder) as gateway:
        gateway.worker._max_model_len = 32
        await gateway.worker.announce()
        gateway.worker.script = lambda job: Script([[1] * 64])
        assert (await gateway.post(COMPLETIONS, {**PROMPT, "max_tokens": 30}))[0] == 400
        assert (await gateway.post(COMPLETIONS, {**PROMPT, "max_tokens": 29}))[1]["usage"]["total_tokens"] == 32


async def test_unknown_model(gateway):
    for name in ("gpt-4", "../../etc/passwd", MODEL + " ", ""):
        status, answer = await gateway.post(CHAT, {**MESSAGES, "model": name})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")


class AwayQueue(QuickQueue):
    """Away whenever `away` names the method."""

    away: frozenset[str] = frozenset()

    async def submit(self, job, *bounds):
        self._check("submit")
        await super().submit(job, *bounds)

    async def workers(self):
        self._check("workers")
        return await super().workers()

    async def now_s(self):
        self._check("now_s")
        return await super().now_s()

    def _check(self, method):
        if method in self.away:
            raise QueueUnavailable("away")


@pytest.mark.parametrize("method", ["submit", "workers", "now_s"])
async def test_queue_away(model_folder, method):
    queue = AwayQueue()
    async with open_gateway(model_folder, queue) as gateway:
        queue.away = frozenset({method})
        for body in (MESSAGES, {**MESSAGES, "stream": True}):
            async with gateway.http.post(gateway.url + CHAT, json=body) as response:
                assert response.status == 503
                assert response.headers["Retry-After"]
                assert (await response.json())["error"]["code"] == "unavailable"
        queue.away = frozenset()
        assert (await gateway.post(CHAT, MESSAGES))[0] == 200


async def test_jobs_wait_where_no_worker_ever_was(model_folder):
    async with open_gateway(model_folder) as gateway:
        await gateway.worker._queue.retire("scripted")
        assert (await gateway.get("/readyz"))[0] == 503
        assert (await gateway.post(CHAT, MESSAGES))[0] == 200


async def test_a_bug_gets_a_number_and_no_traceback(gateway, monkeypatch, caplog):
    def broken(*args, **options):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("service.gateway.core.served_model.ServedModel.encode", broken)
    status, answer = await gateway.post(CHAT, MESSAGES)
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(answer)
    assert "ZeroDivisionError: secret" in caplog.text
    assert answer["error"]["message"].split()[-1].rstrip(".") in caplog.text


async def test_drain_lets_running_requests_end_and_refuses_others(model_folder):
    async with aiohttp.ClientSession() as http:
        async with open_gateway(model_folder, drain_timeout=5.0) as gateway:
            gateway.worker.script = lambda job: speech(gateway.model, "Hello world.", step_s=0.03)
            response = await http.post(gateway.url + CHAT, json={**MESSAGES, "stream": True})
            await response.content.readline()
        # The gateway has left; the stream is complete all the same.
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_drain_time_runs_out(model_folder):
    async with aiohttp.ClientSession() as http:
        async with open_gateway(model_folder, drain_timeout=0.05) as gateway:
            gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
            response = await http.post(gateway.url + CHAT, json={**MESSAGES, "stream": True})
            await response.content.readline()
        text = await response.text()
        assert '"code":"shutdown"' in text
        assert "[DONE]" not in text
