"""The wanted form of an answer as plain values, which another process turns into a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import GrammarError
from model.text.grammar import WHITESPACE, choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.tool_calls.formats import CallFormat, SpecialTokens, calls_grammar
from model.text.tool_calls.reader import Function


@dataclass(frozen=True)
class GrammarSpec:
    """A form of text: a JSON schema, a regular expression, a list of texts or a grammar, by `kind`."""

    kind: str  # json | regex | choice | grammar
    value: Any
    whitespace: str = WHITESPACE  # between the tokens of JSON
    lenient: bool = False  # ignore unknown keywords of a schema


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    format: CallFormat
    functions: tuple[Function, ...]
    arguments_key: str
    max_calls: int
    or_text: bool  # a reply may call nothing
    or_spec: bool  # a reply without calls follows the task's `spec`


@dataclass(frozen=True)
class GrammarTask:
    """Text as in `spec`, or function calls, or either of them."""

    spec: GrammarSpec | None
    calls: CallSpec | None = None


_WRITERS: Mapping[str, Callable[[GrammarSpec], str]] = {
    "json": lambda spec: json_grammar(spec.value, whitespace=spec.whitespace, lenient=spec.lenient),
    "regex": lambda spec: regex_grammar(spec.value),
    "choice": lambda spec: choice_grammar(spec.value),
    "grammar": lambda spec: lark_grammar(spec.value),
}
SPEC_KINDS = tuple(_WRITERS)


def write_grammar(task: GrammarTask, tokens: SpecialTokens) -> str:
    """Return the grammar of `task`. A hostile one may take long. Raises GrammarError."""
    text = None if task.spec is None else _WRITERS[task.spec.kind](task.spec)
    calls = task.calls
    if calls is None:
        if text is None:
            raise GrammarError("The grammar asks for nothing.")
        return text
    return calls_grammar(
        calls.format,
        calls.functions,
        calls.arguments_key,
        tokens,
        max_calls=calls.max_calls,
        or_text=calls.or_text,
        or_grammar=text if calls.or_spec else None,
    )
