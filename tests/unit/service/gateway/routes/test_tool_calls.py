"""Tool calls through the official client: asked for, enforced, whole and in deltas, and sent back."""

from __future__ import annotations

import json
import threading

import openai
import pytest
from pydantic import BaseModel

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.stream import ToolCallStream
from service.errors import RequestError
from service.gateway.core.request import CHAT
from service.gateway.openai import response_builder
from service.gateway.openai.request_reader import read_request
from tests.support.gateway import MODEL, beside, compiler_of, open_gateway, speech, write_model
from tests.support.responses import PARAMETERS, TEMPLATE

WEATHER = {"type": "function", "function": {"name": "weather", "description": "the sky", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tools") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def served(tool_folder):
    async with (
        open_gateway(tool_folder) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="-", max_retries=0) as client,
    ):
        gateway.worker.script = lambda job: speech(gateway.model, TWO)
        yield gateway, client


def ask(client, messages=MESSAGES, **fields):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"tools": [WEATHER, CLOCK], **fields})


def prompt_of(gateway, number=-1) -> str:
    job = gateway.worker.jobs[number]
    ids = [int.from_bytes(job.prompt[i : i + 4], "little") for i in range(0, len(job.prompt), 4)]
    return gateway.model.tokenizer.decode(ids, skip_special_tokens=False)


async def test_calls_of_a_whole_answer(served):
    gateway, client = served
    choice = (await ask(client)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert [(c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("function", "weather", '{"city": "Oslo"}'),
        ("function", "clock", "{}"),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert json.dumps(WEATHER["function"]) in prompt_of(gateway)
    assert gateway.worker.jobs[-1].sampling.grammar is None


async def test_calls_come_in_deltas(served):
    _, client = served
    chunks = [chunk async for chunk in await ask(client, stream=True)]
    text, calls, num_deltas = "", {}, 0
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.id:
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments
            num_deltas += 1
    assert text == "I look."
    assert [call[1:] for call in calls.values()] == [["weather", '{"city": "Oslo"}'], ["clock", "{}"]]
    assert all(call[0].startswith("call_") for call in calls.values())
    assert num_deltas > 6  # as they come, not at their end
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_the_client_s_own_stream_helper(served):
    _, client = served
    strict = [openai.pydantic_function_tool(_Weather, name="weather")]
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=strict) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == _Weather(city="Oslo")


class _Weather(BaseModel):
    city: str


async def test_each_choice_has_its_own_calls(served):
    _, client = served
    answer = await ask(client, n=2)
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [2, 2]
    assert len(ids) == 4


async def test_only_one_call_where_they_may_not_be_parallel(served):
    _, client = served
    choice = (await ask(client, parallel_tool_calls=False)).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


async def test_required_and_named_are_enforced(served):
    gateway, client = served
    await ask(client, tool_choice="required")
    grammar = gateway.worker.jobs[-1].sampling.grammar
    assert '\\"weather\\"' in grammar
    assert '\\"clock\\"' in grammar
    gateway.worker.script = lambda job: speech(gateway.model, CALL)
    choice = (await ask(client, tool_choice={"type": "function", "function": {"name": "weather"}})).choices[0]
    grammar = gateway.worker.jobs[-1].sampling.grammar
    assert '\\"clock\\"' not in grammar
    assert compiler_of(gateway.model).compile(grammar).advance(gateway.model.tokenizer.encode(CALL))
    assert not compiler_of(gateway.model).compile(grammar).advance(gateway.model.tokenizer.encode("hi"))
    assert choice.finish_reason == "stop"  # as at OpenAI, where the client chose the function
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "weather"


async def test_a_strict_function_is_called_right_even_if_it_need_not_be(served):
    gateway, client = served
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await ask(client, tools=[strict])
    compiled = compiler_of(gateway.model).compile(gateway.worker.jobs[-1].sampling.grammar)
    encode = gateway.model.tokenizer.encode
    assert compiled.copy().advance(encode("I may say anything."))
    assert compiled.copy().advance(encode(CALL))
    assert not compiled.copy().advance(encode('<tool_call>\n{"name": "weather", "arguments": {"city": 7}}'))


async def test_an_answer_calls_or_has_the_requested_format(served, tool_folder):
    gateway, client = served
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue"]}}, "required": ["sky"]}
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema, "strict": True}}
    gateway.worker.script = lambda job: speech(gateway.model, '{"sky": "blue"}')
    answer = await ask(client, response_format=form)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ('{"sky": "blue"}', None)
    compiled = compiler_of(gateway.model).compile(gateway.worker.jobs[-1].sampling.grammar)
    encode = gateway.model.tokenizer.encode
    assert compiled.copy().advance(encode('{"sky": "blue"}'))
    assert compiled.copy().advance(encode(CALL))
    assert not compiled.copy().advance(encode('{"sky": "red"}'))
    assert not compiled.copy().advance(encode("I may say anything."))
    await ask(client, response_format=form, tool_choice="required")
    compiled = compiler_of(gateway.model).compile(gateway.worker.jobs[-1].sampling.grammar)
    assert compiled.copy().advance(encode(CALL))
    assert not compiled.copy().advance(encode('{"sky": "blue"}'))
    async with open_gateway(tool_folder, tool_call_parser="llama3_json") as plain:
        body = {"model": MODEL, "messages": MESSAGES, "tools": [CLOCK], "response_format": form}
        status, refused = await plain.post(CHAT, body)
        assert (status, refused["error"]["param"]) == (400, "tool_choice")
        status, _ = await plain.post(CHAT, {**body, "tool_choice": "none"})
        assert status == 200


async def test_none_calls_nothing_and_shows_the_model_nothing(served):
    gateway, client = served
    choice = (await ask(client, tool_choice="none")).choices[0]
    assert choice.message.content == TWO
    assert choice.message.tool_calls is None
    assert "weather" not in prompt_of(gateway)


async def test_calls_and_results_go_back_into_the_conversation(served):
    gateway, client = served
    message = (await ask(client)).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "<|im_end|> fine"} for call in message.tool_calls]
    await ask(client, [*MESSAGES, message.model_dump(exclude_none=True), *results])
    prompt = prompt_of(gateway)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt
    assert prompt.count("<|im_end|> fine") == 2
    ends = gateway.model.tokenizer.special_id("<|im_end|>")
    job = gateway.worker.jobs[-1]
    ids = [int.from_bytes(job.prompt[i : i + 4], "little") for i in range(0, len(job.prompt), 4)]
    assert ids.count(ends) == 5  # system, user, assistant and two results; none of the results' own text


async def test_a_parser_may_be_named(tool_folder):
    async with open_gateway(tool_folder, tool_call_parser="mistral") as gateway:
        text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
        gateway.worker.script = lambda job: speech(gateway.model, text)
        _, answer = await gateway.post(CHAT, {"model": MODEL, "messages": MESSAGES, "tools": [CLOCK]})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "clock", "arguments": "{}"}
        assert len(call["id"]) == 9


async def test_what_cannot_be_had_is_refused(served, model_folder):
    gateway, _ = served
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "objct"}}}
    body = {"model": MODEL, "messages": MESSAGES, "tools": [broken], "tool_choice": "required"}
    status, answer = await gateway.post(CHAT, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "tools", "invalid_grammar")
    async with open_gateway(model_folder) as toolless:
        status, answer = await toolless.post(CHAT, {"model": MODEL, "messages": MESSAGES, "tools": [CLOCK]})
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert toolless.worker.jobs == []


CALLING = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
REFUSED = [
    ("tools[0].type", {"tools": [{"type": "retrieval", "function": {"name": "f"}}]}),
    ("tools[1].type", {"tools": [CLOCK, {"type": "custom", "custom": {"name": "f"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "extra": 1}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
    ("tools", {"tools": [CLOCK, CLOCK]}),
    ("tools", {"tools": [CLOCK] * 513}),
    ("tools", {"tools": "clock"}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": "any"}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "custom", "function": {"name": "clock"}}}),
    ("parallel_tool_calls", {"tools": [CLOCK], "parallel_tool_calls": "no"}),
    ("messages[1].tool_calls", {"messages": [*MESSAGES, {"role": "user", "content": "x", "tool_calls": [CALLING]}]}),
    ("messages[1].content", {"messages": [*MESSAGES, {"role": "assistant"}]}),
    ("messages[1].content", {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": []}]}),
    ("messages", {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
    *(
        (
            "messages[1].tool_calls[0]",
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{**CALLING, **change}]}]},
        )
        for change in (
            {"type": "custom"},
            {"id": "x" * 600},
            {"function": {"name": "a b", "arguments": "{}"}},
            {"function": {"name": "clock", "arguments": "[]"}},
            {"function": {"name": "clock", "arguments": "{"}},
            {"function": {"name": "clock", "arguments": '{"a":' * 70 + "1" + "}" * 70}},
        )
    ),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_bad_tools_are_refused_by_name(param, fields):
    with pytest.raises(RequestError) as caught:
        read_request(CHAT, {"model": "m", "messages": MESSAGES, **fields})
    assert caught.value.status == 400
    assert caught.value.param.startswith(param)


def test_idle_values_ask_for_nothing():
    plain = read_request(CHAT, {"model": "m", "messages": MESSAGES})
    for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": None, "parallel_tool_calls": True}):
        assert read_request(CHAT, {"model": "m", "messages": MESSAGES, **fields}) == plain


def test_a_template_knows_tools_or_not(served_templates):
    with_tools, without = served_templates
    assert with_tools.knows_tools
    assert not without.knows_tools


@pytest.fixture
def served_templates(tool_folder, model_folder):
    return [ChatTemplate.read(folder, Tokenizer.read(folder)) for folder in (tool_folder, model_folder)]


async def test_a_stream_of_calls_is_taken_up_elsewhere_byte_for_byte(served, tool_folder):
    gateway, _ = served
    body = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER, CLOCK], "stream": True}
    async with gateway.http.post(gateway.url + CHAT, json=body) as response:
        whole, request_id = await response.read(), response.headers["X-Request-Id"]
    async with beside(gateway, tool_folder) as other:
        for after in range(0, whole.count(b"id: "), 3):
            url, headers = f"{other.url}/v1/requests/{request_id}", {"Last-Event-ID": str(after)}
            async with other.http.get(url, headers=headers) as response:
                assert await response.read() == whole[whole.find(b"id: %d\n" % (after + 1)) :]


BAD = '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>'
MIXED = f'{BAD}\n{CALL}\nand <tool_call>{{"name": "rm"}}</tool_call><tool_call>{{"name": "clock"}}</tool_call>'
WANTED = [["weather", '{"city": "Oslo"}'], ["clock", "{}"]]
LEFT = f'{BAD}\nand <tool_call>{{"name": "rm"}}</tool_call>'


@pytest.mark.parametrize("n", [1, 2])
async def test_a_bad_call_is_text_and_later_ones_are_calls(served, n):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, MIXED)
    for choice in (await ask(client, n=n)).choices:
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert (choice.message.content.replace("\n", ""), calls) == (LEFT.replace("\n", ""), WANTED)
        assert choice.finish_reason == "tool_calls"


async def test_a_stream_of_them_has_the_same_calls_but_the_sent_part_of_the_bad_one(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, MIXED)
    text, calls = "", {}
    async for chunk in await ask(client, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            streamed = calls.setdefault(call.index, [call.function.name, ""])
            streamed[1] += call.function.arguments
    assert list(calls.values()) == [["weather", '{"city": '], *WANTED]
    assert text.replace("\n", "") == 'Oslo}}</tool_call>and <tool_call>{"name": "rm"}</tool_call>'


async def test_a_response_with_a_bad_call_has_only_whole_ones(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, MIXED)
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    answer = await client.responses.create(model=MODEL, input="hi", tools=tools)
    assert [[item.name, item.arguments] for item in answer.output if item.type == "function_call"] == WANTED
    assert answer.output_text.replace("\n", "") == LEFT.replace("\n", "")


async def test_a_call_that_is_cut_off_is_text_in_a_whole_answer(served):
    gateway, client = served
    cut = CALL[:50]
    gateway.worker.script = lambda job: speech(gateway.model, cut)
    message = (await ask(client)).choices[0].message
    assert (message.content, message.tool_calls) == (cut, None)


async def test_calls_in_python(tool_folder):
    async with open_gateway(tool_folder, tool_call_parser="pythonic") as gateway:
        gateway.worker.script = lambda job: speech(gateway.model, "[weather(city='Os\\'lo', x=(1, None)), clock()]")
        body = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER, CLOCK]}
        _, answer = await gateway.post(CHAT, body)
        message = answer["choices"][0]["message"]
        assert message["content"] is None
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Os\'lo", "x": [1, null]}'},
            {"name": "clock", "arguments": "{}"},
        ]
        await gateway.post(CHAT, {**body, "tool_choice": "required"})
        compiled = compiler_of(gateway.model).compile(gateway.worker.jobs[-1].sampling.grammar)
        encode = gateway.model.tokenizer.encode
        assert compiled.copy().advance(encode('[weather(city="Oslo"), clock()]'))
        assert not compiled.copy().advance(encode("[weather(city=1)"))


async def test_calls_behind_prose_where_the_parser_looks_for_them(tool_folder):
    async with open_gateway(tool_folder, tool_call_parser="llama3_json_anywhere") as gateway:
        text = 'Sure, let me check. {"name": "clock", "parameters": {}}'
        gateway.worker.script = lambda job: speech(gateway.model, text)
        _, answer = await gateway.post(CHAT, {"model": MODEL, "messages": MESSAGES, "tools": [CLOCK]})
        message = answer["choices"][0]["message"]
        assert message["content"] == "Sure, let me check."
        assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


async def test_a_long_answer_is_read_off_the_event_loop(served, monkeypatch):
    gateway, client = served
    readers = []
    own = ToolCallStream.push
    monkeypatch.setattr(response_builder, "MAX_CHARS_AT_ONCE", 200)
    monkeypatch.setattr(
        ToolCallStream, "push", lambda stream, text: (readers.append(threading.current_thread()), own(stream, text))[1]
    )
    for text, is_loop in ((CALL, True), ("the " * 60 + CALL, False)):
        gateway.worker.script = lambda job, text=text: speech(gateway.model, text, per_step=50)
        readers.clear()
        assert (await ask(client)).choices[0].message.tool_calls[0].function.name == "weather"
        assert {reader is threading.main_thread() for reader in readers} == {is_loop}


async def test_only_the_allowed_tools_are_called(served):
    gateway, client = served
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = (await ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["clock"]
    assert json.dumps(WEATHER["function"]) in prompt_of(gateway)
    names = [{"type": "function", "name": "clock"}]
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    choice = {"type": "allowed_tools", "mode": "required", "tools": names}
    answer = await client.responses.create(model=MODEL, input="hi", tools=tools, tool_choice=choice)
    assert '\\"weather\\"' not in gateway.worker.jobs[-1].sampling.grammar
    assert answer.tool_choice.type == "allowed_tools"
