"""`/openapi.json` names every route, and real answers and refusals match it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from service.config.settings import Settings
from service.gateway.app import route_table
from service.gateway.batches.runner import BatchRunner
from service.gateway.core.request import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from service.gateway.core.served_model import ServedModel
from service.gateway.core.service import InferenceService
from service.gateway.endpoints import read_outline
from service.gateway.openapi import answers
from service.gateway.openapi.document import openapi_document
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.support.gateway import MODEL, open_gateway, write_model

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


async def test_it_has_the_documented_routes_of_the_table_and_their_need_of_a_key(folder):
    settings = Settings(model=folder)
    service = InferenceService(settings, ServedModel.read(settings), MemoryGatewayQueue(), read_outline)
    try:
        table = {
            (route.method.lower(), route.path.replace(":.+", "")): route.needs_key
            for route in route_table(service, BatchRunner(service))
            if route.is_documented
        }
    finally:
        await service.close()
    paths = openapi_document("1", "m", keys_required=True)["paths"]
    documented = {(method, path): "security" not in one for path, of in paths.items() for method, one in of.items()}
    assert documented == table


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        (COMPLETIONS, {"prompt": "the", "logprobs": 2, "n": 2}, answers.Completion),
        (COMPLETIONS, {"prompt": ["the", "and"], "echo": True}, answers.Completion),
        (CHAT, {"messages": HELLO}, answers.ChatCompletion),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, answers.ChatCompletion),
        (CHAT, {"messages": HELLO, "n": 9}, answers.Refusal),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "text"}}}, answers.Response),
        (RESPONSES, {"input": HELLO, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}, answers.Response),
        (RESPONSES, {"input": "Hi", "background": True}, answers.Response),
        (RESPONSES, {"input": "Hi", "truncation": "auto"}, answers.Refusal),
        (MESSAGES, {"messages": HELLO}, answers.AnthropicMessage),
        (MESSAGES, {"messages": HELLO, "n": 2}, answers.AnthropicRefusal),
        (f"{RESPONSES}/input_tokens", {"input": "Hi"}, answers.InputTokens),
        (f"{RESPONSES}/resp_none", None, answers.Refusal),
        ("/v1/embeddings", {"input": "Hi"}, answers.Refusal),
        ("/tokenize", {"prompt": "the", "return_token_strs": True}, answers.Tokens),
        ("/detokenize", {"tokens": [1, 2]}, answers.Detokenized),
        ("/v1/models", None, answers.ModelList),
        ("/v1/files", None, answers.FileList),
        ("/v1/batches", None, answers.BatchList),
        ("/version", None, answers.Version),
        ("/server_info", None, answers.ServerInfo),
        ("/livez", None, answers.Status),
        ("/readyz", None, answers.Readiness),
        ("/nowhere", None, answers.Refusal),
    ],
)
async def test_answers_have_the_shape_that_is_documented(folder, path, body, shape):
    async with open_gateway(folder) as gateway:
        if body is None:
            _, answer = await gateway.get(path)
        else:
            most = "max_output_tokens" if path.startswith(RESPONSES) else "max_tokens"
            _, answer = await gateway.post(path, {"model": MODEL, most: 3, **body} if "v1" in path else body)
    msgspec.convert(answer, shape, strict=True)


async def test_requests_have_the_shape_that_is_documented(folder):
    async with open_gateway(folder) as gateway:
        _, queued = await gateway.post(COMPLETIONS, {"model": MODEL, "prompt": "the", "background": True})
        msgspec.convert(queued, answers.RequestState, strict=True)
        async with asyncio.timeout(10):
            while (state := (await gateway.get(f"/v1/requests/{queued['id']}"))[1])["status"] != "completed":
                msgspec.convert(state, answers.RequestState, strict=True)
                await asyncio.sleep(0.005)
        msgspec.convert(state, answers.RequestState, strict=True)
        _, model = await gateway.get(f"/v1/models/{MODEL}")
        msgspec.convert(model, answers.Model, strict=True)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/files", {"limit": "0", "order": "newest"}),
        ("/v1/batches", {"limit": "x"}),
        ("/v1/responses/{response_id}/input_items", {"limit": "10001", "order": "newest"}),
        ("/v1/responses/{response_id}", {"starting_after": "-1", "Last-Event-ID": "x"}),
        ("/v1/requests/{id}", {"Last-Event-ID": "x"}),
    ],
)
async def test_parameters_outside_the_body_are_documented_and_enforced(folder, path, wrong):
    async with open_gateway(folder) as gateway:
        _, document = await gateway.get("/openapi.json")
        received = {each["name"]: each["in"] for each in document["paths"][path]["get"]["parameters"]}
        _, made = await gateway.post(RESPONSES, {"model": MODEL, "input": "Hi"})
        url = path.format(response_id=made["id"], id=made["id"].removeprefix("resp_"))
        for name, value in wrong.items():
            how = {"headers": {name: value}} if received[name] == "header" else {"params": {name: value}}
            how.setdefault("params", {})["stream"] = "true"
            status, answer = await gateway.get(url, **how)
            assert (status, answer["error"]["param"]) == (400, name)


def test_ranges_and_refused_options_are_reported():
    fields = openapi_document("1", "m", keys_required=True)["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["temperature"]["anyOf"][0]["maximum"] == 2
    assert {"type": "null"} in fields["top_p"]["anyOf"]
    assert fields["service_tier"]["enum"] == ["auto", "default", None]
    assert "required" in openapi_document("1", "m", keys_required=True)["components"]["schemas"]["CompletionBody"]
