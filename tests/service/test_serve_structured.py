"""Structured answers, calls of functions and scores of prompts on the demo model, by the official client."""

import json
import random
import re

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.random_schemas import random_schema
from tests.support.schema_validator import is_valid
from tests.support.served import Served

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    running = Served(tmp_path_factory.mktemp("data"))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as made:
        yield made
    running.terminate()


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "demo", "messages": QUESTION, "max_tokens": 400} | fields)


def test_answers_fit_their_schemas(client):
    for seed in range(6):
        schema = random_schema(random.Random(seed), depth=2)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        answer = chat(client, response_format=form, seed=seed, n=2, max_tokens=900)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert is_valid(json.loads(choice.message.content), schema)


def test_an_answer_is_parsed_into_a_class(client):
    class Place(BaseModel):
        name: str = Field(max_length=10)
        sunny: bool

    parsed = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Place, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Place)


def test_guided_forms_streamed_and_not(client):
    for fields, pattern in (
        ({"guided_regex": "[A-Z][a-z]{2,5} [0-9]{2}"}, "[A-Z][a-z]{2,5} [0-9]{2}"),
        ({"guided_choice": ["the fox", "the hen"]}, "the fox|the hen"),
        ({"structured_outputs": {"grammar": 'root ::= "ab" ("," "ab")? "."'}}, r"ab(,ab)?\."),
    ):
        common = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 60, "extra_body": fields}
        whole = client.completions.create(**common, seed=1).choices[0].text
        assert re.fullmatch(pattern, whole)
        chunks = client.completions.create(**common, seed=1, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_beams_under_a_grammar(client):
    fields = {"guided_regex": "(red|green|blue)", "use_beam_search": True, "beam_width": 3}
    answer = client.completions.create(model="demo", prompt="The sky is", max_tokens=20, n=2, extra_body=fields)
    assert all(re.fullmatch("red|green|blue", choice.text) for choice in answer.choices)


def test_calls_that_must_be_and_their_results(client):
    choice = chat(client, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name in ("weather", "clock")
    only = {"type": "function", "function": {"name": "weather"}}
    named = chat(client, tools=[WEATHER], tool_choice=only, stream=True)
    arguments = "".join(part.function.arguments for chunk in named for part in chunk.choices[0].delta.tool_calls or [])
    assert json.loads(arguments)["days"] in (1, 7)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = chat(client, messages=[*QUESTION, choice.message.model_dump(exclude_none=True), result], tools=[WEATHER])
    assert again.choices[0].finish_reason in ("stop", "tool_calls", "length")


def test_echo_scores_what_was_generated_as_it_was(client):
    """Log-likelihood of the same tokens, once generated and once given."""
    prompt = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=1, echo=True, logprobs=1)
    assert prompt.choices[0].logprobs.token_logprobs[0] is None
    common = {"model": "demo", "temperature": 0, "logprobs": 2}
    ids = [11, 300, 45, 7]
    completion = client.completions.create(**common, prompt=ids, max_tokens=30, extra_body={"ignore_eos": True})
    logprobs = completion.choices[0].logprobs
    body = {"return_tokens_as_token_ids": True, "ignore_eos": True}
    named = client.completions.create(**common, prompt=ids, max_tokens=30, extra_body=body).choices[0].logprobs.tokens
    received = [int(name.removeprefix("token_id:")) for name in named]
    answers = client.completions.create(**common, prompt=[ids + received, received], max_tokens=1, echo=True).choices
    assert answers[0].logprobs.token_logprobs[4:34] == pytest.approx(logprobs.token_logprobs, abs=1e-3)
    assert answers[0].logprobs.top_logprobs[4] == pytest.approx(logprobs.top_logprobs[0], abs=1e-3)
    assert answers[1].logprobs.token_logprobs[0] is None
    assert len(answers[1].logprobs.tokens) == 31
