"""A JSON schema is enforced or refused by the keyword's name, however it is sent."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from model.errors import GrammarError
from model.text.grammar import json_grammar
from service.gateway.core.request import CHAT, COMPLETIONS
from service.queue.codec import decode
from service.queue.messages import Reply
from tests.support.gateway import MODEL, QuickQueue, compiler_of, open_gateway, speech
from tests.support.responses import write_tool_model

RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
    CHAT: {"model": MODEL, "messages": MESSAGES},
    RESPONSES: {"model": MODEL, "input": "hi"},
}
TWICE = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"enum": ["x"]}, "minItems": 2, "uniqueItems": True}},
    "required": ["tags"],
}
FREE = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
NOT_ADMIN = {
    "type": "object",
    "properties": {"role": {"type": "string", "not": {"enum": ["admin", "root"]}}},
    "required": ["role"],
    "additionalProperties": False,
}
KEYWORD = "'uniqueItems' at '#/properties/tags'"


def with_function(strict: bool | None, choice, schema=FREE) -> dict:
    function = {"name": "f", "parameters": schema, **({} if strict is None else {"strict": strict})}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def with_form(schema, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}}


def flat(strict: bool, choice) -> dict:
    """Return a function in the form of the responses API."""
    return {"tools": [{"type": "function", "name": "f", "parameters": FREE, "strict": strict}], "tool_choice": choice}


NAMED = {"type": "function", "function": {"name": "f"}}
WAYS = [
    (COMPLETIONS, with_form(FREE), "response_format"),
    (COMPLETIONS, with_form(FREE, strict=True), "response_format"),
    (COMPLETIONS, {"guided_json": FREE}, "guided_json"),
    (COMPLETIONS, {"structured_outputs": {"json": FREE}}, "structured_outputs.json"),
    (CHAT, with_form(FREE), "response_format"),
    (CHAT, with_form(FREE, strict=True), "response_format"),
    (CHAT, {"guided_json": FREE}, "guided_json"),
    (CHAT, {"structured_outputs": {"json": FREE}}, "structured_outputs.json"),
    (CHAT, with_function(True, "auto"), "tools"),
    (CHAT, with_function(True, "required"), "tools"),
    (CHAT, with_function(True, NAMED), "tools"),
    (CHAT, with_function(None, "required"), "tools"),
    (CHAT, with_function(False, NAMED), "tools"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": FREE}}}, "text.format"),
    (RESPONSES, flat(True, "auto"), "tools"),
    (RESPONSES, flat(False, "required"), "tools"),
    (RESPONSES, flat(True, {"type": "function", "name": "f"}), "tools"),
]


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory):
    return write_tool_model(tmp_path_factory.mktemp("schemas") / "model")


@pytest.fixture
async def served(tool_folder):
    async with open_gateway(tool_folder, QuickQueue()) as gateway:
        yield gateway


async def test_what_no_grammar_can_hold_is_refused_by_name(served):
    for endpoint, fields, param in WAYS:
        for stream in (False, True):
            status, answer = await served.post(endpoint, {**BODIES[endpoint], **fields, "stream": stream})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_grammar"), (
                fields
            )
            assert KEYWORD in answer["error"]["message"]
    assert served.worker.jobs == []


async def test_what_allows_nothing_is_refused(served):
    """Two different tags of one: nothing."""
    for endpoint, fields in (
        (CHAT, with_form(TWICE)),
        (CHAT, with_function(True, "auto", TWICE)),
        (COMPLETIONS, {"guided_json": TWICE}),
    ):
        status, answer = await served.post(endpoint, {**BODIES[endpoint], **fields})
        assert (status, answer["error"]["code"]) == (400, "invalid_grammar")
    assert served.worker.jobs == []


async def test_a_function_that_is_not_strict_and_need_not_be_called_is_free(served):
    status, _ = await served.post(CHAT, {**BODIES[CHAT], **with_function(False, "auto")})
    assert status == 200
    assert served.worker.jobs[-1].sampling.grammar is None


async def test_a_job_holds_what_a_grammar_can(served):
    served.worker.script = lambda job: speech(served.model, '{"role": "user"}')
    for fields in (with_form(NOT_ADMIN), with_form(NOT_ADMIN, strict=True), {"guided_json": NOT_ADMIN}):
        for endpoint in (CHAT, COMPLETIONS):
            status, _ = await served.post(endpoint, {**BODIES[endpoint], **fields})
            assert status == 200
            matcher = compiler_of(served.model).compile(served.worker.jobs[-1].sampling.grammar)
            encode = served.model.tokenizer.encode
            assert matcher.copy().advance(encode('{"role": "user"}', False))
            assert not matcher.copy().advance(encode('{"role": "admin"}', False))
    status, _ = await served.post(CHAT, {**BODIES[CHAT], **with_function(True, "required", NOT_ADMIN)})
    assert status == 200
    assert "role" in served.worker.jobs[-1].sampling.grammar


def large_schema(num_bytes: int) -> dict:
    """Return a schema like those of Kubernetes: many definitions, mostly prose."""
    size = 900
    definitions = {
        f"d{i}": {
            "description": "word " * (size // 5),
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": f"#/definitions/d{i + 1}"}},
        }
        for i in range(num_bytes // (size + 150))
    }
    last = {f"d{len(definitions)}": {"type": "integer"}}
    return {"$ref": "#/definitions/d0", "definitions": {**definitions, **last}}


async def test_a_schema_of_half_a_mebibyte_is_served(served):
    schema = large_schema(500_000)
    served.worker.script = lambda job: speech(served.model, "{}")
    for endpoint, fields in (
        (CHAT, with_form(schema)),
        (COMPLETIONS, {"structured_outputs": {"json": schema}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}),
    ):
        status, answer = await served.post(endpoint, {**BODIES[endpoint], **fields})
        assert status == 200, answer
    with pytest.raises(GrammarError):
        json_grammar(large_schema(1_200_000))


async def test_a_producer_has_the_same(served):
    served.worker.script = lambda job: speech(served.model, "{}")
    for name, fields, error in (("a", with_form(FREE), KEYWORD), ("b", with_form(large_schema(500_000)), None)):
        entry = {"v": 1, "id": name, "endpoint": CHAT, "body": {**BODIES[CHAT], **fields}}
        await served.queue.produce("default", msgpack.packb(entry))
        async with asyncio.timeout(10):
            while not (replies := served.queue.replies("default", name)):
                await asyncio.sleep(0.01)
        reply = decode(Reply, replies[-1])
        assert reply.error is None if error is None else error in reply.error["message"]
