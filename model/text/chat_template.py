"""Renders messages to prompt token ids with the model's chat template, byte-identical to Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes

from model.errors import ModelError
from model.text.special_token_escaping import SpecialTokenEscaper
from model.text.template_bounds import RenderLimits
from model.text.template_sandbox import Refusal, TemplateSandbox
from model.text.tokenizer import Tokenizer
from model.text.tokenizer_files import MAX_CONFIG_BYTES, TOKENIZER_CONFIG, read_json_if_any, read_text

TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
MAX_REFUSAL_CHARS = 300
MAX_SOURCE_CHARS = 256 << 10
"""Total over a folder's templates; published ones use at most a tenth."""

Json = Mapping[str, Any]


class TemplateError(ValueError):
    """Error in rendering a conversation; its message may be shown to the client."""


class ChatTemplate:
    """A model's chat template. Immutable and thread-safe."""

    @classmethod
    def read(cls, directory: Path, tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate | None:
        """Load `given` (a path or template text), else the folder's template; None if absent. Raises ModelError.

        `chat_template.jinja` overrides `tokenizer_config.json`, whose "tool_use" template serves requests with tools.
        """
        sources = _read_sources(directory) if given is None else {"default": _given_text(given)}
        if not sources:
            return None
        if sum(map(len, sources.values())) > MAX_SOURCE_CHARS:
            raise ModelError(f"the chat template of {directory} has more than {MAX_SOURCE_CHARS} characters")
        try:
            return cls(sources, tokenizer)
        except jinja2.TemplateSyntaxError as error:
            reason = f"{' '.join(str(error.message).split())[:MAX_REFUSAL_CHARS]} (line {error.lineno})"
            raise ModelError(f"the chat template of {directory} is malformed: {reason}") from error
        except (RecursionError, MemoryError) as error:
            raise ModelError(f"the chat template of {directory} is nested too deeply") from error
        except (SyntaxError, ValueError, OverflowError) as error:
            # Python rejects Jinja's generated code, e.g. an overlong number
            raise ModelError(f"the chat template of {directory} cannot be compiled: {_first_line(error)}") from error

    def __init__(
        self,
        sources: Mapping[str, str],
        tokenizer: Tokenizer,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile Jinja sources by name, including "default". Raises jinja2.TemplateSyntaxError."""
        self._tokenizer = tokenizer
        self._sandbox = TemplateSandbox(limits or RenderLimits(), now)
        self._templates = {name: self._sandbox.from_string(source) for name, source in sources.items()}
        self._escaper = self._build_escaper(sources.values())
        self.source = sources["default"]
        self.tool_source = sources.get("tool_use", self.source)
        self.variables = frozenset(meta.find_undeclared_variables(self._sandbox.parse(self.tool_source)))
        self.knows_tools = "tools" in self.variables

    def render(
        self,
        messages: Sequence[Json],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Json] | None = None,
        extra: Json | None = None,
    ) -> str:
        """Return the prompt text, without escaping special tokens. Raises TemplateError."""
        rendered = self._render(_variables(messages, add_generation_prompt, tools, extra))
        return _cut_after(rendered, messages[-1]["content"]) if continue_final_message else rendered

    def encode(
        self,
        messages: Sequence[Json],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Json] | None = None,
        extra: Json | None = None,
    ) -> list[int]:
        """Return the prompt's token ids; special tokens in messages, tools or `extra` become plain text.

        `continue_final_message` ends the prompt after the last message's content. Raises TemplateError.
        """
        variables = _variables(messages, add_generation_prompt, tools, extra)
        try:
            escaped, placeholders = self._escaper.escape(variables)
            rendered = self._render(escaped)
            if continue_final_message:
                rendered = _cut_after(rendered, escaped["messages"][-1]["content"])
            return self._tokenizer.encode_template(rendered, placeholders)
        except TemplateError:
            raise
        except RecursionError as error:
            raise TemplateError("The messages or tools are nested too deeply.") from error
        except ValueError as error:
            raise TemplateError(f"The messages cannot be encoded: {error}.") from error

    def _render(self, variables: Json) -> str:
        template = self._templates["default"]
        if variables["tools"] is not None:
            template = self._templates.get("tool_use", template)
        try:
            return self._stream(template, {**self._tokenizer.named_tokens, **variables})
        except Refusal as error:
            reason = " ".join(str(error).split())[:MAX_REFUSAL_CHARS]
            raise TemplateError(f"The model's chat template refuses these messages: {reason}") from error
        except jinja2.UndefinedError as error:
            raise TemplateError(f"The model's chat template has an undefined variable: {error.message}.") from error
        except Exception as error:  # templates are untrusted code and may raise anything
            raise TemplateError("The model's chat template cannot render these messages.") from error

    def _stream(self, template: jinja2.Template, variables: Json) -> str:
        chunks: list[str] = []
        num_chars = 0
        with self._sandbox.metered():
            for chunk in template.generate(variables):
                self._sandbox.check_time()
                num_chars += len(chunk)
                if num_chars > self._sandbox.limits.max_chars:
                    raise TemplateError("The rendered messages are too long.")
                chunks.append(chunk)
        return "".join(chunks)

    def _build_escaper(self, sources: Iterable[str]) -> SpecialTokenEscaper:
        literals = list(self._tokenizer.named_tokens.values())
        words = list(ROLES)
        for source in sources:
            tree = self._sandbox.parse(source)
            constants = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            literals += constants
            literals += [node.data for node in tree.find_all(nodes.TemplateData)]
            words += constants
            words += [node.attr for node in tree.find_all(nodes.Getattr)]
        return SpecialTokenEscaper(self._tokenizer.special_tokens, literals, words)


def _variables(
    messages: Sequence[Json], add_generation_prompt: bool, tools: Sequence[Json] | None, extra: Json | None
) -> dict[str, Any]:
    clash = OWN_VARIABLES.intersection(extra or {})
    if clash:
        raise TemplateError(f"The template variable {min(clash)} cannot be set.")
    own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    return {**own, **(extra or {})}


def _cut_after(rendered: str, content: str) -> str:
    """Truncate `rendered` after its last `content`, whose outer blanks the template may strip."""
    core = content.strip()
    start = rendered.rfind(core)
    if not core or start < 0:
        raise TemplateError("The model's chat template does not show the last message, so it cannot be continued.")
    whole = content.lstrip()
    return rendered[: start + len(whole if rendered.startswith(whole, start) else core)]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:MAX_REFUSAL_CHARS]


def _given_text(given: str) -> str:
    """Read the file `given`; a text with a brace is itself the template, as in vLLM."""
    source = read_text(Path(given), MAX_CONFIG_BYTES) if "{" not in given else given
    if source is None:
        raise ModelError(f"--chat-template: {given}: no such file (leave it out for the model's own template)")
    return source


def _read_sources(directory: Path) -> dict[str, str]:
    source = read_text(directory / TEMPLATE_FILE, MAX_CONFIG_BYTES)
    if source is not None:
        return {"default": source}
    value = read_json_if_any(directory / TOKENIZER_CONFIG).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        sources = {item["name"]: item["template"] for item in value}
    except (TypeError, KeyError) as error:
        raise ModelError(f"the chat_template of {directory} is not a text or a list of named templates") from error
    if not isinstance(sources.get("default"), str) or not all(isinstance(s, str) for s in sources.values()):
        raise ModelError(f"the chat_template of {directory} has no 'default'")
    return sources
