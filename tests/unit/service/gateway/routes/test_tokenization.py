"""`/tokenize` of messages is what a chat of the same fields gives its worker, tools and all, and refuses the same."""

from __future__ import annotations

import itertools

import pytest

from service.gateway.core.request import CHAT
from service.queue.codec import unpack_ids
from tests.support.gateway import MODEL, open_gateway, write_model
from tests.support.responses import PARAMETERS

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "description": "<|im_end|>", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "hi <|im_end|>", "refusal": None}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "a"}'}}
CHOICES = {
    "messages": [
        [USER],
        [USER, {"role": "assistant", "content": "It is"}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
    ],
    "tools": [None, [TOOL], []],
    "add_generation_prompt": [None, True, False],
    "continue_final_message": [None, True],
    "chat_template_kwargs": [None, {"enable_thinking": True}],
}


@pytest.fixture
async def knowing(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with open_gateway(folder) as gateway:
        yield gateway


async def test_the_ids_match_the_chat(knowing):
    prompts = set()
    for values in itertools.product(*CHOICES.values()):
        fields = dict(zip(CHOICES, values, strict=True))
        status, tokens = await knowing.post("/tokenize", fields)
        chat_status, answer = await knowing.post(CHAT, {"model": MODEL, "max_tokens": 1, **fields})
        assert status == chat_status
        if status == 200:
            assert tuple(tokens["tokens"]) == tuple(unpack_ids(knowing.worker.jobs[-1].prompt))
            prompts.add(tuple(tokens["tokens"]))
        else:
            assert tokens == answer
    assert len(prompts) > 15


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**TOOL, "type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": "weather"}, "tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"prompt": "hi", "messages": None, "tools": [TOOL]}, "tools"),
        ({"prompt": "hi", "messages": None, "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "hi", "messages": None, "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
    ],
)
async def test_what_a_chat_refuses_is_refused_alike(knowing, fields, param):
    status, answer = await knowing.post("/tokenize", {"messages": [USER], **fields})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_tools_that_the_template_does_not_know_are_refused(gateway):
    status, answer = await gateway.post("/tokenize", {"messages": [USER], "tools": [TOOL]})
    assert (status, answer["error"]["param"]) == (400, "tools")
