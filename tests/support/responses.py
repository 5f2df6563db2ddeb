"""Shared by tests of `/v1/responses`: a model with a tool template, a tool, a call of it, a client."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.support.gateway import Gateway, write_model

RESPONSES = "/v1/responses"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Answer with <tool_call> and \"arguments\".<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "the sky", "parameters": PARAMETERS, "strict": False}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def write_tool_model(folder: Path) -> Path:
    """Write a model folder like `write_model`, with a template that renders tools."""
    write_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def client_of(gateway: Gateway, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
