"""Structured answers at the gateway: each way to ask becomes one grammar in the job, or is refused by name."""

import json

import openai
import pytest
from pydantic import BaseModel

from model.text.grammar import COMPACT, choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import GrammarTask, write_grammar
from service.gateway.core.request import CHAT, COMPLETIONS
from service.gateway.openai.request_reader import read_request
from tests.support.gateway import MODEL, open_gateway, speech

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NO_TOKENS = TokenTable([], {}, [])
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {COMPLETIONS: {"model": "m", "prompt": "hi"}, CHAT: {"model": "m", "messages": MESSAGES}}


def strict(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


WAYS = [
    ({"response_format": {"type": "json_object"}}, json_grammar({"type": "object"})),
    ({"response_format": strict(SCHEMA, strict=True)}, json_grammar(SCHEMA)),
    ({"response_format": strict(SCHEMA)}, json_grammar(SCHEMA, lenient=True)),
    ({"response_format": strict(None)}, json_grammar({"type": "object"}, lenient=True)),
    ({"guided_json": SCHEMA}, json_grammar(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, json_grammar(SCHEMA)),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, json_grammar(SCHEMA, whitespace=" ?")),
    ({"guided_regex": "[a-z]+", "guided_decoding_backend": "auto"}, regex_grammar("[a-z]+")),
    ({"guided_choice": ["yes", "no"]}, choice_grammar(["yes", "no"])),
    ({"guided_grammar": 'root ::= "a" | "b"'}, lark_grammar('root ::= "a" | "b"')),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        json_grammar(SCHEMA, whitespace=COMPACT),
    ),
    ({"structured_outputs": {"json_object": True}}, json_grammar({"type": "object"})),
    ({"structured_outputs": {"regex": "a|b", "choice": None}}, regex_grammar("a|b")),
    ({"structured_outputs": {"choice": ["a"], "disable_fallback": True}}, choice_grammar(["a"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, lark_grammar('start: "a"')),
]


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize(("fields", "text"), WAYS)
def test_each_way_to_ask_is_one_grammar(endpoint, fields, text):
    wish = read_request(endpoint, {**BODIES[endpoint], **fields}).sampling.grammar
    assert write_grammar(GrammarTask(wish.spec), NO_TOKENS) == text


@pytest.mark.parametrize("endpoint", BODIES)
def test_text_asks_for_nothing(endpoint):
    asked = read_request(endpoint, {**BODIES[endpoint], "response_format": {"type": "text"}, "guided_json": None})
    assert asked.sampling.grammar is None


async def test_the_job_carries_the_grammar(model_folder):
    async with open_gateway(model_folder) as gateway:
        for fields, text in WAYS:
            status, _ = await gateway.post(CHAT, {"model": MODEL, "messages": MESSAGES, **fields})
            assert status == 200
            assert gateway.worker.jobs[-1].sampling.grammar == text


async def test_a_grammar_that_does_not_compile_is_refused_before_it_is_a_job(model_folder):
    async with open_gateway(model_folder) as gateway:
        for fields, param in (
            ({"guided_regex": "(a\x07"}, "guided_regex"),
            ({"response_format": strict({"type": "objct"})}, "response_format"),
            ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ):
            status, answer = await gateway.post(CHAT, {"model": MODEL, "messages": MESSAGES, **fields})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_grammar")
            assert answer["error"]["message"].isprintable()
        assert gateway.worker.jobs == []


async def test_only_a_strict_schema_is_refused_for_unknown_keywords(model_folder):
    schema = {"type": "string", "format": "no-such-format"}
    async with open_gateway(model_folder) as gateway:
        body = {"model": MODEL, "messages": MESSAGES}
        assert (await gateway.post(CHAT, {**body, "response_format": strict(schema)}))[0] == 200
        assert (await gateway.post(CHAT, {**body, "response_format": strict(schema, strict=True)}))[0] == 400


async def test_the_official_client_parses_into_a_class(model_folder):
    class City(BaseModel):
        city: str
        people: int

    async with (
        open_gateway(model_folder) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="-", max_retries=0) as client,
    ):
        gateway.worker.script = lambda job: speech(gateway.model, '{"city": "Oslo", "people": 7}')
        answer = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
        assert answer.choices[0].message.parsed == City(city="Oslo", people=7)
        asked = gateway.worker.jobs[0].sampling.grammar
        assert '"additionalProperties": false' in asked
        answer = await client.completions.create(
            model=MODEL, prompt="x", extra_body={"structured_outputs": {"choice": ["a", "b"]}}
        )
        assert gateway.worker.jobs[1].sampling.grammar == choice_grammar(["a", "b"])
