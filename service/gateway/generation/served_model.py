"""The text half of the model behind the doors: its name, its limits, and text to token ids."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from model.config import ModelConfig, generation_defaults
from model.errors import ModelError
from model.text.chat_template import ChatTemplate, TemplateError
from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import CallSpec, GrammarSpec, GrammarTask
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import (
    CALL_FORMATS,
    MAX_FORCED_CALLS,
    CallFormat,
    detect_arguments_key,
    detect_format,
)
from service.config.settings import Settings
from service.errors import RequestError, StartupError
from service.gateway.generation.refusals import refusal, too_long
from service.gateway.generation.request import Conversation, GenerationRequest, Prompt, ToolSpec

LONG_TEXT_CHARS = 256 << 10
PIECE_CHARS = 64 << 10
PIECE_SLACK_TOKENS = 1024
"""A text that is cut may have some tokens more than the whole."""
MAX_ESCAPE_BYTES = 6
"""JSON's longest way to write a character of one byte."""


@dataclass(frozen=True)
class CallOptions:
    """What an answer may call, and how its model writes that."""

    form: CallFormat
    schemas: Mapping[str, Any]  # of the arguments, by name of the function
    only_one: bool
    is_named: bool  # the client chose the function


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Immutable and shared by all threads."""

    name: str
    vocab_size: int  # width of the logits, which is what a token id is held against
    max_model_len: int  # tokens, prompt and output; workers may allow less
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tokens: TokenTable  # for the processes that compile grammars
    call_form: CallFormat | None  # how it writes calls of functions; None: its template does not tell it of any
    defaults: Mapping[str, float]  # sampling that the model's makers recommend
    created_s: int  # Unix seconds
    fingerprint: str

    @classmethod
    def read(cls, settings: Settings) -> ServedModel:
        """The model in `settings.model`. Raises StartupError, one line that names the file."""
        directory = settings.model
        if directory is None:
            raise StartupError("no model folder is given (--model)")
        try:
            config = ModelConfig.read(directory)
            tokenizer = Tokenizer.read(directory)
            template = ChatTemplate.read(directory, tokenizer)
            defaults = generation_defaults(directory)
        except ModelError as error:
            raise StartupError(str(error)) from error
        name = settings.served_model_name or directory.name
        return cls(
            name=name,
            vocab_size=config.vocab_size,
            max_model_len=min(config.max_position, settings.max_model_len or config.max_position),
            eos_token_ids=config.eos_token_ids,
            tokenizer=tokenizer,
            template=template,
            call_form=_call_form(settings, template),
            tokens=TokenTable.of(tokenizer, config.vocab_size, config.eos_token_ids),
            defaults=defaults,
            created_s=int(time.time()),
            fingerprint="fp_" + hashlib.sha256(f"{name} {config}".encode()).hexdigest()[:10],
        )

    def require(self, name: str | None) -> None:
        """Raises RequestError (404) for a `name` that is not this model's."""
        if name not in (None, self.name):
            message = "The model does not exist; GET /v1/models names the one that is served."
            raise RequestError(404, message, param="model", code="model_not_found")

    def encode(self, prompt: Prompt, add_special_tokens: bool = True, *, keeps_end: bool = False) -> list[int]:
        """Token ids of a prompt, each inside the vocabulary, at least one. Raises RequestError (400).

        May take long: call it off the event loop. A text with more bytes than the longest possible prompt could have
        is refused before any time is spent on it, a long one as soon as it is seen to have too many tokens. Where the
        caller `keeps_end` of it alone, of such a text only the end is encoded.
        """
        if isinstance(prompt, str):
            self._check_bytes(len(prompt.encode()), "prompt")
            end = self._end_of([prompt])
            if len(end) < len(prompt):
                if not keeps_end:
                    raise too_long(self.max_model_len, "prompt")
                prompt = end
            return self._checked(self.tokenizer.encode(prompt, add_special_tokens), "prompt")
        if isinstance(prompt, tuple):
            return self._checked(list(prompt), "prompt")
        texts = [m["content"] for m in prompt.messages]
        if len(self._end_of(texts)) < sum(map(len, texts)):
            raise too_long(self.max_model_len, "messages")
        return self._checked(self._encode_conversation(prompt), "messages")

    def _end_of(self, texts: Sequence[str]) -> str:
        """The texts together, but of long ones only the end, with more tokens than a prompt may have. It is encoded
        piece by piece: a whole text takes 200 bytes a byte, and a second or two a megabyte."""
        if sum(map(len, texts)) <= LONG_TEXT_CHARS:
            return "".join(texts)
        end, num_left = [], self.max_model_len + self.max_model_len // 8 + PIECE_SLACK_TOKENS
        for text in reversed(texts):
            for stop in range(len(text), 0, -PIECE_CHARS):
                if num_left < 0:
                    return "".join(reversed(end))
                end.append(text[max(0, stop - PIECE_CHARS) : stop])
                num_left -= len(self.tokenizer.encode(end[-1], add_special_tokens=False))
        return "".join(reversed(end))

    def check_ids(self, ids: list[int] | tuple[int, ...], param: str) -> None:
        """Raises RequestError (400) for an id that is outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise refusal(param, "has a token id outside the vocabulary")

    def grammar_task(self, request: GenerationRequest) -> GrammarTask | None:
        """What holds the answer to its form, if anything does. Raises RequestError (400) for tools that this model
        cannot call."""
        grammar, tools = request.sampling.grammar, request.tools
        form = None if grammar is None else grammar.spec
        calls = None if tools is None else self._calls(tools, form)
        if form is None and calls is None:
            return None
        return GrammarTask(form, calls)

    def check_tools(self, tools: ToolSpec | None) -> None:
        """Raises RequestError (400) for tools that the model's chat template would not tell of."""
        if tools is not None and self.call_form is None:
            raise refusal("tools", "cannot be had: this model's chat template knows none")

    def call_options(self, tools: ToolSpec | None) -> CallOptions | None:
        """How calls are told from text in the answer, where it may have any."""
        if tools is None or self.call_form is None:
            return None
        schemas = {function.name: function.parameters for function in tools.callable}
        return CallOptions(self.call_form, schemas, tools.only_one, tools.is_named)

    def _calls(self, tools: ToolSpec, form: GrammarSpec | None) -> CallSpec | None:
        """The calls that must be, or that must be right, where an answer that calls nothing must have this `form`."""
        self.check_tools(tools)
        if form is not None and not tools.must_call and self.call_form.syntax.bare:
            raise refusal(
                "tool_choice", "cannot be 'auto' where the answer must have a form: calls of this model have no opening"
            )
        if form is None and not tools.must_call and not any(function.is_strict for function in tools.callable):
            return None
        return CallSpec(
            format=self.call_form,
            functions=tools.callable,
            arguments_key=detect_arguments_key(self.template.tool_source),
            max_calls=1 if tools.only_one else MAX_FORCED_CALLS,
            or_text=not tools.must_call,
            or_spec=form is not None and not tools.must_call,
        )

    def _encode_conversation(self, conversation: Conversation) -> list[int]:
        if self.template is None:
            raise refusal("messages", "needs a chat template, and this model has none; use /v1/completions")
        self._check_bytes(sum(len(m["content"].encode()) for m in conversation.messages), "messages")
        calls = [m.get("tool_calls", ()) for m in conversation.messages]
        self._check_bytes(len(msgspec.json.encode([calls, conversation.tools])) // MAX_ESCAPE_BYTES, "messages")
        try:
            return self.template.encode(
                list(conversation.messages),
                add_generation_prompt=conversation.add_generation_prompt,
                tools=list(conversation.tools) or None,
                continue_final_message=conversation.continue_final_message,
                extra=dict(conversation.template_options),
            )
        except TemplateError as error:
            raise RequestError(400, str(error), param="messages") from None

    def _check_bytes(self, num_bytes: int, param: str) -> None:
        if num_bytes > self.max_model_len * self.tokenizer.longest_token_bytes:
            raise too_long(self.max_model_len, param)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise refusal(param, "must not be empty")
        self.check_ids(ids, param)
        return ids


def _call_form(settings: Settings, template: ChatTemplate | None) -> CallFormat | None:
    if template is None or not template.knows_tools:
        return None
    if settings.tool_call_parser is None:
        return detect_format(template.tool_source)
    return CALL_FORMATS[settings.tool_call_parser]
