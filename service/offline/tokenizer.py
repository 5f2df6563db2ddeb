"""The tokenizer returned by `get_tokenizer`, with transformers' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.text.chat_template import ChatTemplate
from service.errors import RequestError
from service.gateway.core.request import CHAT
from service.gateway.core.request import Conversation as ChatPrompt
from service.gateway.core.served_model import ServedModel
from service.offline.prompts import Conversation, conversations
from service.offline.sampling_params import checked_request
from service.offline.vllm_names import VllmNames, named

Rendered = str | list[int]


class LLMTokenizer(VllmNames):
    """Converts text to token ids and back. Immutable and thread-safe."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._tokenizer = model.tokenizer

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self.convert_tokens_to_ids(self.bos_token or "")

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.convert_tokens_to_ids(self.eos_token or "")

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def chat_template(self) -> str | None:
        """The template's Jinja source."""
        return None if self._model.template is None else self._model.template.source

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token as spelled in tokenizer.json; None if there is none."""
        return self._tokenizer.token_id(token)

    @named
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids; special tokens in `text` are parsed. Raises ValueError for a lone surrogate."""
        return self._tokenizer.encode(text, add_special_tokens, parse_special=True)

    @named
    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(token_id) for token_id in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Rendered | list[Rendered]:
        """Return a conversation's prompt, or a list for several, as token ids or text. Raises ValueError.

        In token ids, special tokens in messages are plain text. `chat_template`: a file or text. `variables`: the
        template's.
        """
        model = self._model if chat_template is None else with_template(self._model, chat_template)
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": variables or None}
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        asked = conversations(conversation)
        rendered = [_rendered(model, {"messages": one, **options}, tokenize=tokenize) for one in asked]
        return rendered[0] if len(asked) == 1 and asked[0] is not conversation[0] else rendered


def with_template(model: ServedModel, given: str) -> ServedModel:
    """Return the model with another chat template, a file or text. Raises ValueError."""
    try:
        return replace(model, template=ChatTemplate.read(Path(), model.tokenizer, given))
    except ModelError as error:
        raise ValueError(f"'chat_template': {error}") from None


def _rendered(model: ServedModel, fields: dict[str, Any], *, tokenize: bool) -> Rendered:
    request = checked_request(CHAT, {name: value for name, value in fields.items() if value is not None})
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    try:
        return model.encode(prompt) if tokenize else model.render(prompt)
    except RequestError as error:
        raise ValueError(error.message) from None
