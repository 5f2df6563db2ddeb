"""Writes what Hugging Face transformers renders, so that our tests can compare without it.

Run in an environment of its own that has `transformers` and `jinja2`, from the root of the repository:
`PYTHONPATH=. python tests/support/make_template_goldens.py`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tests.support import make_tokenizers

TEMPLATES = Path(__file__).parents[1] / "unit" / "model" / "text" / "templates"
STYLES = {
    "llama2": make_tokenizers.llama2_style,
    "llama3": make_tokenizers.llama3_style,
    "mistral": make_tokenizers.mistral_style,
    "mistral_calls": make_tokenizers.mistral_style,
    "qwen2_5": make_tokenizers.qwen_style,
    "qwen3": make_tokenizers.qwen_style,
    "controls": make_tokenizers.qwen_style,
}
NOW = datetime(2026, 2, 3, 4, 5)
"""The date that templates see."""
SYSTEM = {"role": "system", "content": '  You are <helpful> & "kind".\n'}
HELLO = {"role": "user", "content": "hello world, 안녕하세요 뷁 😀 'what' is this?\n\n  "}
ANSWER = {"role": "assistant", "content": " the answer\tis é\u0301 "}
THOUGHT = {"role": "assistant", "content": "<think>\nhow is it\n</think>\n\nthe weather"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "서울", "n": 1.5}}}],
}
RESULT = {"role": "tool", "name": "weather", "content": '{"sky": "<b>clear</b>"}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather of a city, 'now' & <then>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "string"}}},
        },
    }
]
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
CALLS = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "<서울>"}}},
        {"id": "abcdefgh2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": '{"sky": "<b>clear</b>"}'},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": "12:00"},
]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"role": "user", "content": [{"type": "image"}]}
DATE = {"date_string": "26 Jul 2024"}


def cases(name: str) -> list[dict[str, Any]]:
    """Conversations that the named template can render; keys are the arguments of `ChatTemplate.render`."""
    plain = [
        {"messages": [HELLO]},
        {"messages": [SYSTEM, HELLO]},
        {"messages": [SYSTEM, HELLO, ANSWER, HELLO]},
        {"messages": [HELLO, ANSWER], "add_generation_prompt": False},
    ]
    if name == "llama2":
        return plain
    if name in ("controls", "mistral_calls"):
        return plain + calling_cases(name)
    tooled = [{"messages": [SYSTEM, HELLO], "tools": TOOLS}]
    if name != "qwen3":
        tooled.append({"messages": [HELLO, CALL], "tools": TOOLS})
    if name in ("llama3", "qwen2_5"):
        tooled.append({"messages": [HELLO, CALL, RESULT, ANSWER, HELLO], "tools": TOOLS})
    if name == "qwen3":
        tooled.append({"messages": [HELLO, THOUGHT, HELLO, THOUGHT], "extra": {"enable_thinking": False}})
        tooled.append({"messages": [HELLO, ANSWER, PARTS], "extra": {"enable_thinking": False}})
    extra = {"extra": DATE} if name == "llama3" else {}
    return [case | extra for case in plain + tooled]


def calling_cases(name: str) -> list[dict[str, Any]]:
    """Return conversations with calls and results, refused ones included."""
    called = [HELLO, CALLS, *RESULTS]
    cases = [
        {"messages": [SYSTEM, HELLO], "tools": [*TOOLS, CLOCK]},
        {"messages": called, "tools": [*TOOLS, CLOCK]},
        {"messages": [SYSTEM, *called, ANSWER, HELLO], "tools": TOOLS},
    ]
    if name == "controls":
        timed = {"messages": [HELLO, PARTS], "extra": {"with_time": True}}
        return [*cases, timed, {"messages": [ANSWER]}, {"messages": [IMAGE]}]
    foreign = {**CALLS, "tool_calls": [{**CALLS["tool_calls"][0], "id": "call_1234567890"}]}
    king = {"role": "king", "content": "so be it"}
    return [*cases, *({"messages": [HELLO, other]} for other in (HELLO, foreign, king))]


def golden(tokenizer: PreTrainedTokenizerFast, case: dict[str, Any]) -> dict[str, Any]:
    arguments = {
        "conversation": case["messages"],
        "tools": case.get("tools"),
        "add_generation_prompt": case.get("add_generation_prompt", True),
        **case.get("extra", {}),
    }
    try:
        text = tokenizer.apply_chat_template(**arguments, tokenize=False)
    except jinja2.TemplateError as error:
        return {"arguments": case, "error": str(error)}
    ids = tokenizer.apply_chat_template(**arguments, tokenize=True, return_dict=False)
    return {"arguments": case, "text": text, "ids": ids}


def one_case_a_line(goldens: dict[str, Any]) -> str:
    """Return JSON with one case per line."""
    parts = []
    for name, entry in goldens.items():
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in entry["cases"])
        parts.append(f'"{name}": {{"style": "{entry["style"]}", "cases": [\n{lines}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    chat_template_utils.datetime = SimpleNamespace(now=lambda: NOW)
    goldens = {}
    for name, style in STYLES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = style(Path(folder))
            shutil.copy(TEMPLATES / f"{name}.jinja", path / "chat_template.jinja")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            goldens[name] = {"style": style.__name__, "cases": [golden(tokenizer, case) for case in cases(name)]}
    (TEMPLATES / "goldens.json").write_text(one_case_a_line(goldens), encoding="utf-8")


if __name__ == "__main__":
    main()
