"""Reasoning of chats: apart from the content, before calls and forms, off where the client asks."""

from __future__ import annotations

import json

import pytest

from service.gateway.core.request import CHAT
from tests.support.gateway import MODEL, beside, compiler_of, open_gateway, speech, write_model

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if forced %}<think>\n{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue"]}}, "required": ["sky"]}
FORM = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("thinking") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
async def gateway(folder):
    async with open_gateway(folder) as opened:
        opened.worker.script = lambda job: speech(opened.model, f"<think>\nI look.\n</think>\n\nSee: {CALL}")
        yield opened


def prompt_of(gateway):
    job = gateway.worker.jobs[-1]
    ids = [int.from_bytes(job.prompt[i : i + 4], "little") for i in range(0, len(job.prompt), 4)]
    return gateway.model.tokenizer.decode(ids, skip_special_tokens=False)


async def message_of(gateway, **fields):
    status, answer = await gateway.post(CHAT, {"messages": MESSAGES, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"], answer


async def test_a_whole_answer(gateway):
    message, answer = await message_of(gateway, tools=[CLOCK])
    assert message["reasoning"] == message["reasoning_content"] == "I look."
    assert message["content"] == "See:"
    assert message["tool_calls"][0]["function"]["name"] == "clock"
    assert 3 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n": 2, "best_of": 3}, {"logprobs": True, "stop": ["nowhere"]}])
async def test_deltas_make_the_whole_answer(gateway, fields):
    _, whole = await message_of(gateway, tools=[CLOCK], **fields)
    body = {"model": MODEL, "messages": MESSAGES, "tools": [CLOCK], **fields}
    found = [{"reasoning": "", "content": ""} for _ in whole["choices"]]
    for data in (await gateway.events(CHAT, body))[:-1]:
        (choice,) = json.loads(data)["choices"]
        delta, message = choice["delta"], found[choice["index"]]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        assert not (delta.get("reasoning") and message["content"])
    for choice, message in zip(whole["choices"], found, strict=True):
        assert message == {name: choice["message"][name] for name in message}


async def test_it_is_off_where_the_client_asks(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "<think> is a tag")
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message, answer = await message_of(gateway, **fields)
        assert message == {"role": "assistant", "content": "<think> is a tag", "refusal": None}
        assert prompt_of(gateway).endswith("<think>\n\n</think>\n\n")
        assert "completion_tokens_details" not in answer["usage"]
    message, _ = await message_of(gateway, reasoning_effort="high", include_reasoning=False)
    assert message["content"] == ""
    assert "reasoning" not in message
    assert prompt_of(gateway).endswith("assistant\n")


async def test_a_prompt_may_open_it(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "I look.\n</think>4")
    message, _ = await message_of(gateway, chat_template_kwargs={"forced": {"any": ["json", 1]}})
    assert (message["reasoning"], message["content"]) == ("I look.", "4")
    again = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    fields = {"messages": again, "add_generation_prompt": False, "continue_final_message": True}
    message, _ = await message_of(gateway, **fields)
    assert (message["reasoning"], message["content"]) == ("I look.", "4")


async def test_without_an_end_there_is_no_content(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "<think>I look")
    message, _ = await message_of(gateway)
    assert (message["reasoning"], message["content"]) == ("I look", None)


async def test_it_goes_back_to_the_template(gateway):
    for name in ("reasoning", "reasoning_content"):
        received = {"role": "assistant", "content": None, name: "thus"}
        await message_of(gateway, messages=[*MESSAGES, received, *MESSAGES])
        assert "<think>thus</think>" in prompt_of(gateway)
    for bad in ({"role": "user", "content": "a", "reasoning": "b"}, {**received, "reasoning": "other"}):
        status, answer = await gateway.post(CHAT, {"messages": [bad]})
        assert status == 400
        assert answer["error"]["param"].startswith("messages[0].reasoning")


async def test_forms_and_forced_calls_follow_it(gateway):
    encode = gateway.model.tokenizer.encode
    for fields, good, bad in (
        ({"response_format": FORM}, '{"sky": "blue"}', '{"sky": "red"}'),
        ({"tools": [CLOCK], "tool_choice": "required"}, CALL, "I may not speak."),
        ({"response_format": FORM, "tools": [CLOCK]}, '{"sky": "blue"}', "I may not speak."),
    ):
        for options, thought in (({}, "<think>so {</think>\n\n"), ({"forced": True}, "so {\n</think>\n")):
            await message_of(gateway, chat_template_kwargs=options, **fields)
            compiled = compiler_of(gateway.model).compile(gateway.worker.jobs[-1].sampling.grammar)
            for start in (thought, *([] if options else [""])):
                matcher = compiled.copy()
                assert matcher.advance(encode(start + good))
                assert matcher.is_complete
                assert not compiled.copy().advance(encode(start + bad))
            begun = compiled.copy()
            assert begun.advance(encode(thought.partition("</")[0]))
            assert not begun.is_complete
        await message_of(gateway, chat_template_kwargs={"enable_thinking": False}, **fields)
        compiled = compiler_of(gateway.model).compile(gateway.worker.jobs[-1].sampling.grammar)
        assert not compiled.advance(encode("<think>so</think>" + good))


BAD_OPTIONS = [{"messages": []}, {"a b": 1}, {"_x": 1}, {"1": 1}, {f"a{i}": 1 for i in range(33)}]


@pytest.mark.parametrize("options", BAD_OPTIONS)
async def test_bad_template_variables_are_refused(gateway, options):
    status, answer = await gateway.post(CHAT, {"messages": MESSAGES, "chat_template_kwargs": options})
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


async def test_a_parser_may_be_named_or_none(folder):
    for parser, wanted in (("none", (None, "so</think>4")), ("deepseek_r1", ("so", "4"))):
        async with open_gateway(folder, reasoning_parser=parser) as gateway:
            gateway.worker.script = lambda job: speech(gateway.model, "so</think>4")
            message, _ = await message_of(gateway)
            assert (message.get("reasoning"), message["content"]) == wanted


async def test_a_stream_is_taken_up_elsewhere_byte_for_byte(gateway, folder):
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "chat_template_kwargs": {"forced": True}}
    async with gateway.http.post(gateway.url + CHAT, json=body) as response:
        whole, request_id = await response.read(), response.headers["X-Request-Id"]
    assert b'"reasoning":' in whole
    async with beside(gateway, folder) as other:
        for after in range(0, whole.count(b"id: "), 3):
            url, headers = f"{other.url}/v1/requests/{request_id}", {"Last-Event-ID": str(after)}
            async with other.http.get(url, headers=headers) as response:
                assert await response.read() == whole[whole.find(b"id: %d\n" % (after + 1)) :]


async def test_a_budget_and_rules_reach_the_worker(gateway):
    encode = gateway.model.tokenizer.encode
    end_ids = tuple(encode("</think>", add_special_tokens=False))
    for options, is_open in (({}, False), ({"forced": True}, True)):
        await message_of(gateway, thinking_token_budget=9, chat_template_kwargs=options)
        budget = gateway.worker.jobs[-1].sampling.rules.reasoning
        assert (budget.max_tokens, budget.end_ids, budget.is_open) == (9, end_ids, is_open)
    # Its template opens the reasoning for any effort.
    await message_of(gateway, reasoning_effort="none", chat_template_kwargs={"forced": True})
    assert gateway.worker.jobs[-1].sampling.rules.reasoning.max_tokens == 0
    await message_of(gateway, thinking_token_budget=9, reasoning_effort="none")
    assert gateway.worker.jobs[-1].sampling.rules is None
    await message_of(gateway, allowed_token_ids=[3, 1, 3], bad_words=["the"], cache_salt="s")
    job = gateway.worker.jobs[-1]
    assert (job.cache_salt, job.sampling.rules.allowed_token_ids) == ("s", (3, 1))
    assert set(job.sampling.rules.bad_words) == {tuple(encode(text)) for text in ("the", " the")}
    for name, bad in (("allowed_token_ids", [10**6]), ("bad_words", [" "]), ("thinking_token_budget", -1)):
        status, answer = await gateway.post(CHAT, {"messages": MESSAGES, name: bad})
        assert (status, answer["error"]["param"]) == (400, name)
