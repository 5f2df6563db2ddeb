"""The served model as text: limits, tokenizer, chat template, tool-call format."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from model.config import ModelConfig, generation_defaults, overriding_defaults
from model.errors import ModelError
from model.text.chat_template import OWN_VARIABLES, ChatTemplate, TemplateError
from model.text.grammar_compiler import TokenTable
from model.text.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningState, ReasoningStream, detect_reasoning
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import CALL_FORMATS, CallFormat, detect_format
from service.config.settings import Settings
from service.errors import RequestError, StartupError
from service.gateway.core.adapter_files import read_modules
from service.gateway.core.refusals import refusal, too_long
from service.gateway.core.request import Conversation, Prompt, ToolSpec
from service.queue.records import AdapterRecord

LONG_TEXT_CHARS = 256 << 10
CHUNK_CHARS = 64 << 10
CHUNK_SLACK_TOKENS = 1024
"""Chunks may encode to a few more tokens than the whole text."""
MAX_ESCAPE_BYTES = 6
"""Length of JSON's longest escape for a one-byte character."""


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on or off."""
NO_EFFORT = "none"

Rendered = TypeVar("Rendered", str, list[int])


@dataclass(frozen=True)
class CallOptions:
    format: CallFormat
    schemas: Mapping[str, Any]  # of arguments, by function name
    only_one: bool
    is_named: bool  # the client chose the function


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model. Immutable; shared by all threads."""

    name: str
    aliases: tuple[str, ...] = ()  # other names accepted in requests
    vocab_size: int  # width of the logits; upper bound of token ids
    max_model_len: int  # prompt plus output tokens; workers may allow fewer
    generates: bool = True  # False: a base model without a head, for embeddings only
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tokens: TokenTable  # for the grammar processes
    call_format: CallFormat | None  # None: the chat template has no tools
    reasoning_format: ReasoningFormat | None  # None: all text is content
    reasoning_ids: frozenset[int]  # special tokens in its markers
    defaults: Mapping[str, float]  # the checkpoint's recommended sampling parameters
    template_defaults: Mapping[str, Any] = field(default_factory=dict)  # for chat_template_kwargs
    created_s: int  # Unix seconds
    adapters: Mapping[str, AdapterRecord] = field(default_factory=dict)  # from --lora-modules
    fingerprint: str

    @classmethod
    def read(cls, settings: Settings) -> ServedModel:
        """Read the model folder. Raises StartupError with one line that names the file."""
        directory = settings.model
        if directory is None:
            raise StartupError("no model folder is given (--model)")
        try:
            config = ModelConfig.read(directory, settings.config_overrides)
            tokenizer = Tokenizer.read(directory)
            template = ChatTemplate.read(directory, tokenizer, settings.chat_template)
            defaults = _default_sampling(settings, directory)
            adapters = read_modules(config, settings)
        except ModelError as error:
            raise StartupError(str(error)) from error
        name, *aliases = settings.model_names
        reasoning = _reasoning_format(settings, template)
        markers = () if reasoning is None else (reasoning.start, reasoning.end)
        return cls(
            name=name,
            aliases=tuple(aliases),
            vocab_size=config.vocab_size,
            max_model_len=min(config.max_position, settings.max_model_len or config.max_position),
            generates=config.has_head,
            eos_token_ids=config.eos_token_ids,
            tokenizer=tokenizer,
            template=template,
            call_format=_call_format(settings, template),
            reasoning_format=reasoning,
            reasoning_ids=frozenset(i for text in markers if (i := tokenizer.special_id(text)) is not None),
            tokens=TokenTable.of(tokenizer, config.vocab_size, config.eos_token_ids),
            defaults=defaults,
            template_defaults=_template_defaults(settings),
            created_s=int(time.time()),
            adapters=adapters,
            fingerprint="fp_" + hashlib.sha256(f"{name} {config}".encode()).hexdigest()[:10],
        )

    def description(self) -> dict[str, str | int | None]:
        return {
            "model": self.name,
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
            "tool_call_parser": _name_of(self.call_format, CALL_FORMATS),
            "reasoning_parser": _name_of(self.reasoning_format, REASONING_FORMATS),
        }

    def is_base(self, name: str | None) -> bool:
        """Return whether `name` in a request's `model` field is the base model."""
        return name in (None, self.name, *self.aliases)

    def answer_name(self, name: str | None) -> str:
        """Return the name for responses: the base model's first name, or the adapter's."""
        return self.name if name is None or self.is_base(name) else name

    def require(self, name: str | None, loaded: Container[str] = ()) -> None:
        """Raises RequestError (404) unless `name` is None, a name of this model or an adapter.

        `loaded`: adapters loaded at run time.
        """
        if not self.is_base(name) and name not in self.adapters and name not in loaded:
            message = "The model does not exist; GET /v1/models lists the names that are served."
            raise RequestError(404, message, param="model", code="model_not_found")

    def encode(
        self, prompt: Prompt, add_special_tokens: bool = True, *, parse_special: bool = False, keeps_end: bool = False
    ) -> list[int]:
        """Return at least one token id, each within the vocabulary. Raises RequestError (400).

        Slow: call it off the event loop. A text with more bytes than any valid prompt is refused without encoding. One
        with too many tokens is refused early; with `keeps_end`, only its end is encoded.
        """
        if isinstance(prompt, str):
            self._check_bytes(len(prompt.encode()), "prompt")
            end = self._end_of([prompt])
            if len(end) < len(prompt):
                if not keeps_end:
                    raise too_long(self.max_model_len, "prompt")
                prompt = end
            return self._checked(
                self.tokenizer.encode(prompt, add_special_tokens, parse_special=parse_special), "prompt"
            )
        if isinstance(prompt, tuple):
            return self._checked(list(prompt), "prompt")
        texts = [m["content"] for m in prompt.messages]
        if len(self._end_of(texts)) < sum(map(len, texts)):
            raise too_long(self.max_model_len, "messages")
        return self._checked(self._by_template(prompt, ChatTemplate.encode), "messages")

    def render(self, conversation: Conversation) -> str:
        """Return the prompt as text, including special tokens in messages. Raises RequestError (400)."""
        return self._by_template(conversation, ChatTemplate.render)

    def _end_of(self, texts: Sequence[str]) -> str:
        """Return the joined texts; of a long text only the end, with more tokens than a prompt may have.

        Encodes in chunks: encoding a whole text takes 200 bytes of memory per byte, and 1 to 2 s per MB.
        """
        if sum(map(len, texts)) <= LONG_TEXT_CHARS:
            return "".join(texts)
        end: list[str] = []
        num_left = self.max_model_len + self.max_model_len // 8 + CHUNK_SLACK_TOKENS
        for text in reversed(texts):
            for stop in range(len(text), 0, -CHUNK_CHARS):
                if num_left < 0:
                    return "".join(reversed(end))
                end.append(text[max(0, stop - CHUNK_CHARS) : stop])
                num_left -= len(self.tokenizer.encode(end[-1], add_special_tokens=False))
        return "".join(reversed(end))

    def check_ids(self, ids: list[int] | tuple[int, ...], param: str) -> None:
        """Raises RequestError (400) for a token id outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise refusal(param, "has a token id outside the vocabulary")

    def reasoning_stream(self, state: ReasoningState) -> ReasoningStream | None:
        """Return a reasoning parser; None: all text is content."""
        if self.reasoning_format is None or state is ReasoningState.OFF:
            return None
        return ReasoningStream(self.reasoning_format, state)

    def check_tools(self, tools: ToolSpec | None) -> None:
        """Raises RequestError (400) for tools if the chat template does not support them."""
        if tools is not None:
            self.require_call_format()

    def call_options(self, tools: ToolSpec | None) -> CallOptions | None:
        """Return how to parse tool calls; None: the response has none."""
        if tools is None or self.call_format is None:
            return None
        schemas = {function.name: function.parameters for function in tools.callable}
        return CallOptions(self.call_format, schemas, tools.only_one, tools.is_named)

    def require_call_format(self) -> tuple[CallFormat, ChatTemplate]:
        """Return call format and chat template. Raises RequestError (400) if this model cannot call tools."""
        if self.call_format is None or self.template is None:
            raise refusal("tools", "are not supported: this model's chat template has none")
        return self.call_format, self.template

    def _by_template(self, conversation: Conversation, render: Callable[..., Rendered]) -> Rendered:
        if self.template is None:
            raise refusal("messages", "needs a chat template, and this model has none; use /v1/completions")
        self._check_bytes(sum(len(m["content"].encode()) for m in conversation.messages), "messages")
        other = [[m.get("tool_calls", ()), m.get("reasoning_content", "")] for m in conversation.messages]
        options = self._template_options(conversation)
        encoded = json.dumps([other, conversation.tools, options], ensure_ascii=False, separators=(",", ":")).encode()
        self._check_bytes(len(encoded) // MAX_ESCAPE_BYTES, "messages")
        try:
            return render(
                self.template,
                list(conversation.messages),
                add_generation_prompt=conversation.add_generation_prompt,
                tools=list(conversation.tools) or None,
                continue_final_message=conversation.continue_final_message,
                extra=options,
            )
        except TemplateError as error:
            raise RequestError(400, str(error), param="messages") from None

    def _template_options(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template's variables. `reasoning_effort` also sets the template's reasoning switch, if any."""
        wanted: dict[str, Any] = dict(conversation.hints)
        if "reasoning_effort" in wanted:
            wanted |= dict.fromkeys(THINKING_SWITCHES, wanted["reasoning_effort"] != NO_EFFORT)
        known = frozenset() if self.template is None else self.template.variables
        hints = {name: value for name, value in wanted.items() if name in known}
        return {**self.template_defaults, **hints, **conversation.template_options}

    def _check_bytes(self, num_bytes: int, param: str) -> None:
        if num_bytes > self.max_model_len * self.tokenizer.longest_token_bytes:
            raise too_long(self.max_model_len, param)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise refusal(param, "must not be empty")
        self.check_ids(ids, param)
        return ids


def _name_of(value: object, known: Mapping[str, object]) -> str | None:
    return next((name for name, one in known.items() if one == value), None)


def _template_defaults(settings: Settings) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(settings.default_chat_template_kwargs or "{}")
    for name in found:
        if name in OWN_VARIABLES:
            raise StartupError(f"--default-chat-template-kwargs: {name} is set by the request")
    return found


def _reasoning_format(settings: Settings, template: ChatTemplate | None) -> ReasoningFormat | None:
    if settings.reasoning_parser is not None:
        return REASONING_FORMATS.get(settings.reasoning_parser)  # None for "none"
    return None if template is None else detect_reasoning(template.source)


def _default_sampling(settings: Settings, directory: Path) -> dict[str, float | int]:
    """Raises ModelError."""
    source, override = settings.generation_config, settings.override_generation_config
    defaults: dict[str, float | int] = {}
    if source != "vllm":
        folder = directory if source == "auto" else Path(source)
        if not folder.is_dir():
            raise ModelError(f"--generation-config: {source}: no such folder (auto, vllm or a folder)")
        defaults = generation_defaults(folder)
    if override is not None:
        defaults |= overriding_defaults(override, "--override-generation-config")
    return defaults


def _call_format(settings: Settings, template: ChatTemplate | None) -> CallFormat | None:
    if template is None or not template.knows_tools:
        return None
    if settings.tool_call_parser is None:
        return detect_format(template.tool_source)
    return CALL_FORMATS[settings.tool_call_parser]
