"""What people's libraries make of a running server: litellm, LangChain and LlamaIndex each complete a chat, stream
one, and get a tool call; the first two a structured answer as well.

In an environment of its own: `pip install litellm mcp langchain-openai llama-index-llms-openai-like`, then
`python tests/support/smoke_clients.py http://127.0.0.1:8000/v1 MODEL [litellm langchain llama_index]`.
Nothing of Quire is imported.
"""

from __future__ import annotations

import json
import sys

from pydantic import BaseModel, Field

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

    common = {"model": f"openai/{model}", "api_base": url, "api_key": "-", "max_tokens": 120}
    messages = [{"role": "user", "content": QUESTION}]
    assert litellm.completion(messages=messages, **common).choices[0].message.content
    stream = litellm.completion(messages=messages, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
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

    chat = ChatOpenAI(model=model, base_url=url, api_key="-", max_tokens=120)
    assert chat.invoke(QUESTION).content
    assert "".join(chunk.content for chunk in chat.stream(QUESTION))
    (call,) = chat.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION).tool_calls
    assert call["args"]["city"] is not None
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)
    assert isinstance(chat.with_structured_output(Weather, method="function_calling").invoke(QUESTION), Weather)


def with_llama_index(url: str, model: str) -> None:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=url, api_key="-", max_tokens=120, is_chat_model=True, is_function_calling_model=True
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert llm.chat(messages).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(messages))

    def weather(city: str) -> str:
        """The sky now."""
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(fn=weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert "city" in call.tool_kwargs


LIBRARIES = {"litellm": with_litellm, "langchain": with_langchain, "llama_index": with_llama_index}


def main(url: str, model: str, *names: str) -> None:
    for name in names or LIBRARIES:
        LIBRARIES[name](url, model)
        print(f"{name}: all well")


if __name__ == "__main__":
    main(*sys.argv[1:])
