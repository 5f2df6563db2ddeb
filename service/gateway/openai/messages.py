"""The messages of a conversation: OpenAI's, as clients send them, to what a chat template renders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.gateway.generation.refusals import missing, refusal
from service.gateway.generation.request import Conversation
from service.gateway.openai.bodies import Message
from service.gateway.openai.fields import IDLE_MESSAGE_FIELDS, without_idle_fields
from service.gateway.openai.tools import calls_of

MAX_LABEL_CHARS = 512
MAX_MESSAGES = 4096


def plain_messages(value: Any) -> Any:
    """`value` with the idle fields of its messages removed; anything that is no list of maps is returned as it is."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_MESSAGES:
        raise refusal("messages", f"has more than {MAX_MESSAGES} entries")
    return [
        without_idle_fields(message, IDLE_MESSAGE_FIELDS, f"messages[{i}].") if isinstance(message, dict) else message
        for i, message in enumerate(value)
    ]


def conversation(messages: list[Message], add_generation_prompt: bool, options: Mapping[str, bool]) -> Conversation:
    """Typed messages to what the template renders. Raises RequestError (400)."""
    if not messages:
        raise refusal("messages", "must not be empty")
    plain = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(messages=plain, add_generation_prompt=add_generation_prompt, template_options=options)


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _message(message: Message, param: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise refusal(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    content = message.content
    if message.tool_calls and message.role != "assistant":
        raise refusal(f"{param}.tool_calls", "belong to messages of the assistant")
    if content is None:
        if not message.tool_calls:
            raise missing(f"{param}.content")
        content = ""
    if not isinstance(content, str):
        if any(part.type != "text" for part in content):
            raise refusal(f"{param}.content", "may hold only parts of type text")
        content = "\n".join(part.text for part in content)
    plain = {"role": ROLES[message.role], "content": content}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            check_length(f"{param}.{name}", value, MAX_LABEL_CHARS)
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = calls_of(message.tool_calls, f"{param}.tool_calls")
    return plain


def check_length(param: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise refusal(param, f"is longer than {max_chars} characters")
