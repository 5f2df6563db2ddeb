"""Runs clients against a server: a chat, a stream, a tool call, a structured answer and reasoning by each.

The server is the demo model with `--reasoning-parser deepseek_r1`: all is reasoning until its budget is spent.

In an environment of its own: `pip install anthropic litellm mcp langchain-openai langchain-anthropic
llama-index-llms-openai-like`, then `python tests/support/smoke_clients.py http://127.0.0.1:8000/v1 MODEL [NAME ...]`.
Nothing of Quire is imported.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from pydantic import BaseModel, Field

BUDGET = {"thinking_token_budget": 8}
THINK = {**BUDGET, "min_tokens": 24}
QUESTION = "What is the weather in Oslo?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "the sky now", "parameters": PARAMETERS}}


class Weather(BaseModel):
    """The sky now."""

    city: str = Field(max_length=12)


def with_litellm(url: str, model: str) -> None:
    import litellm

    common = {"model": f"openai/{model}", "api_base": url, "api_key": "-", "max_tokens": 120, "extra_body": THINK}
    messages = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(messages=messages, **common).choices[0].message
    assert message.content
    assert message.reasoning_content
    chunks = list(litellm.completion(messages=messages, stream=True, **common))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert any(getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks)
    answer = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", **common).choices[0]
    call = answer.message.tool_calls[0]
    assert call.function.name == "weather"
    json.loads(call.function.arguments)["city"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = litellm.completion(messages=[*messages, answer.message.model_dump(), result], tools=[TOOL], **common)
    assert again.choices[0].finish_reason
    structured = litellm.completion(messages=messages, response_format=Weather, **common)
    Weather.model_validate_json(structured.choices[0].message.content)


def with_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=url, api_key="-", max_tokens=120, extra_body=THINK)
    assert chat.invoke(QUESTION).content
    assert "".join(chunk.content for chunk in chat.stream(QUESTION))
    (call,) = chat.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION).tool_calls
    assert call["args"]["city"] is not None
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)
    assert isinstance(chat.with_structured_output(Weather, method="function_calling").invoke(QUESTION), Weather)
    common = {"model": model, "base_url": url, "api_key": "-", "max_tokens": 120, "extra_body": BUDGET}
    blocks = ChatOpenAI(**common, use_responses_api=True, reasoning={"summary": "auto"}).invoke(QUESTION).content_blocks
    assert blocks[0]["type"] == "reasoning"


def with_langchain_anthropic(url: str, model: str) -> None:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url.removesuffix("/v1"), api_key="-", max_tokens=120)
    assert chat.invoke(QUESTION).text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION))
    (call,) = chat.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION).tool_calls
    assert call["args"]["city"] is not None
    assert isinstance(chat.with_structured_output(Weather).invoke(QUESTION), Weather)
    thinking = chat.bind(thinking={"type": "enabled", "budget_tokens": 8})
    assert thinking.invoke(QUESTION).content_blocks[0]["type"] == "reasoning"


def with_openai(url: str, model: str) -> None:
    import openai

    client, messages = openai.OpenAI(base_url=url, api_key="-"), [{"role": "user", "content": QUESTION}]
    create = partial(client.chat.completions.create, model=model, messages=messages, max_tokens=120, extra_body=THINK)
    message = create().choices[0].message
    assert message.content
    assert message.reasoning
    deltas = [chunk.choices[0].delta for chunk in create(stream=True)]
    assert "".join(delta.content or "" for delta in deltas)
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas)
    (call,) = create(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    json.loads(call.function.arguments)["city"]
    respond = partial(client.responses.create, model=model, input=QUESTION, max_output_tokens=120, extra_body=BUDGET)
    assert respond().output[0].type == "reasoning"
    kinds = [event.type for event in respond(stream=True, reasoning={"summary": "auto"})]
    assert "response.reasoning_summary_text.delta" in kinds
    parsed = client.responses.parse(
        model=model, input=QUESTION, text_format=Weather, max_output_tokens=120, extra_body=BUDGET
    )
    assert isinstance(parsed.output_parsed, Weather)


def with_anthropic(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="-")
    common = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 120}
    thinking = {"type": "enabled", "budget_tokens": 8}
    # Without `thinking` the end of the reasoning is forced at once.
    assert all(part.type == "text" for part in client.messages.create(**common).content)
    assert client.messages.create(**common, thinking=thinking).content[0].type == "thinking"
    with client.messages.stream(**common, thinking=thinking) as stream:
        assert stream.get_final_message().content[0].thinking
    tool = {"name": "weather", "input_schema": PARAMETERS}
    chosen = client.messages.create(**common, tools=[tool], tool_choice={"type": "tool", "name": "weather"})
    use = chosen.content[-1]
    assert "city" in use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    common["messages"] += [{"role": "assistant", "content": chosen.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**common, tools=[tool]).stop_reason
    form = {"type": "json_schema", "schema": PARAMETERS}
    Weather.model_validate_json(client.messages.create(**common, output_config={"format": form}).content[-1].text)


def with_llama_index(url: str, model: str) -> None:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model,
        api_base=url,
        api_key="-",
        max_tokens=120,
        is_chat_model=True,
        is_function_calling_model=True,
        additional_kwargs={"extra_body": THINK},
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = llm.chat(messages)
    assert answer.message.content
    assert answer.raw.choices[0].message.reasoning
    assert isinstance(llm.as_structured_llm(Weather).chat(messages).raw, Weather)
    assert "".join(part.delta or "" for part in llm.stream_chat(messages))

    def weather(city: str) -> str:
        """The sky now."""
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(fn=weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert "city" in call.tool_kwargs


LIBRARIES = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "litellm": with_litellm,
    "langchain": with_langchain,
    "langchain_anthropic": with_langchain_anthropic,
    "llama_index": with_llama_index,
}


def main(url: str, model: str, *names: str) -> None:
    for name in names or LIBRARIES:
        LIBRARIES[name](url, model)
        print(f"{name}: all well")


if __name__ == "__main__":
    main(*sys.argv[1:])
