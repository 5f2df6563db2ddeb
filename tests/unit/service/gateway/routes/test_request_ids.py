"""The client's name for a request: in the answer, in the header, and to find it by."""

from __future__ import annotations

import json

import pytest

from service.gateway.core.request import CHAT, COMPLETIONS
from tests.support.gateway import MODEL, beside, open_gateway, speech

PROMPT = {"model": MODEL, "prompt": "Hi", "max_tokens": 24}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
NAME = "req/01:+=7"


@pytest.fixture
async def pair(model_folder):
    """Two gateways on one queue."""
    async with open_gateway(model_folder) as one, beside(one, model_folder) as other:
        one.worker.script = lambda job: speech(one.model, "hello there")
        yield one, other


async def asked(gateway, path, body, **headers):
    async with gateway.http.post(gateway.url + path, json=body, headers=headers) as response:
        return response.headers.get("X-Request-Id"), response.status, await response.json()


@pytest.mark.parametrize(("path", "body", "prefix"), [(CHAT, MESSAGES, "chatcmpl-"), (COMPLETIONS, PROMPT, "cmpl-")])
async def test_an_answer_has_the_clients_name_and_is_found_by_it_elsewhere(pair, path, body, prefix):
    one, other = pair
    shown, status, answer = await asked(one, path, {**body, "request_id": "in-body"}, **{"X-Request-Id": NAME})
    assert (shown, status, answer["id"]) == (NAME, 200, prefix + NAME)  # the header precedes the body
    for name in (NAME, prefix + NAME):
        status, state = await other.get(f"/v1/requests/{name.replace('/', '%2F')}")
        assert (status, state["response"]) == (200, answer)
    shown, _, answer = await asked(one, path, {**body, "request_id": "in-body"})
    assert (shown, answer["id"]) == ("in-body", f"{prefix}in-body")


async def test_streams_carry_it_and_are_resumed_and_cancelled_by_it(pair):
    one, other = pair
    body = {**PROMPT, "stream": True, "resumable": True}
    async with one.http.post(one.url + COMPLETIONS, json=body, headers={"X-Request-Id": NAME}) as response:
        whole = await response.read()
    ids = {json.loads(line[6:])["id"] for line in whole.split(b"\n") if line.startswith(b"data: {")}
    assert ids == {f"cmpl-{NAME}"}
    async with other.http.get(f"{other.url}/v1/requests/{NAME.replace('/', '%2F')}?stream=true") as response:
        assert response.headers["X-Request-Id"] == NAME
        assert await response.read() == whole
    one.worker.script = lambda job: speech(one.model, "hello there", step_s=60)
    _, status, _ = await asked(one, CHAT, {**MESSAGES, "background": True}, **{"X-Request-Id": "slow"})
    assert status == 202
    async with other.http.delete(f"{other.url}/v1/requests/slow") as response:
        assert response.status == 200
        assert (await response.json())["status"] in ("cancelling", "cancelled")


async def test_a_name_in_use_is_not_given_twice(pair):
    one, other = pair
    _, _, first = await asked(one, CHAT, MESSAGES, **{"X-Request-Id": "trace"})
    one.worker.script = lambda job: speech(one.model, "another one")
    shown, status, second = await asked(other, CHAT, MESSAGES, **{"X-Request-Id": "trace"})
    assert status == 200
    assert second["id"] == f"chatcmpl-{shown}" != first["id"]
    for name, answer in (("trace", first), (shown, second)):
        assert (await other.get(f"/v1/requests/{name}"))[1]["response"] == answer
    key = {"Idempotency-Key": "k", "X-Request-Id": "keyed"}
    answers = [await asked(gateway, CHAT, MESSAGES, **key) for gateway in pair]
    assert answers[0] == answers[1]
    assert answers[0][0] == "keyed"


async def test_names_belong_to_a_tenant(model_folder):
    async with open_gateway(model_folder, api_key=("alpha", "beta")) as one:
        for key in ("alpha", "beta"):
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
            shown, _, answer = await asked(one, CHAT, MESSAGES, **headers)
            assert (shown, answer["id"]) == ("mine", "chatcmpl-mine")


async def test_other_characters_are_refused_in_a_body_and_ignored_in_a_header(pair):
    one, _ = pair
    for name in ("a b", "x" * 129, "é", "a\nb"):
        _, status, answer = await asked(one, CHAT, {**MESSAGES, "request_id": name})
        assert (status, answer["error"]["param"]) == (400, "request_id")
    shown, status, answer = await asked(one, CHAT, MESSAGES, **{"X-Request-Id": "a b"})
    assert (status, answer["id"]) == (200, f"chatcmpl-{shown}")
    assert len(shown) == 26
    shown, status, _ = await asked(one, CHAT, {"model": MODEL}, **{"X-Request-Id": "bad"})
    assert (shown, status) == ("bad", 400)


async def test_a_full_store_leaves_the_name_without_a_record(model_folder):
    async with open_gateway(model_folder, max_stored_bytes_per_tenant=400) as one:
        shown, status, answer = await asked(one, CHAT, MESSAGES, **{"X-Request-Id": "kept"})
        assert (shown, status, answer["id"]) == ("kept", 200, "chatcmpl-kept")
        assert (await one.get("/v1/requests/kept"))[0] == 404
