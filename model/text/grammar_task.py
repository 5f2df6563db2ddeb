"""Output constraints as plain values, which another process turns into a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import GrammarError
from model.text.grammar import WHITESPACE, choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.tool_calls.formats import CallSpec, SpecialTokens, calls_grammar


@dataclass(frozen=True)
class GrammarSpec:
    kind: str  # json | regex | choice | grammar
    value: Any
    whitespace: str = WHITESPACE  # between the tokens of JSON
    lenient: bool = False  # ignore unknown keywords of a schema


@dataclass(frozen=True)
class GrammarTask:
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
    """Return the grammar of `task`; a hostile one may take long. Raises GrammarError."""
    text = None if task.spec is None else _WRITERS[task.spec.kind](task.spec)
    if task.calls is not None:
        return calls_grammar(task.calls, tokens, text if task.calls.or_spec else None)
    if text is None:
        raise GrammarError("The grammar asks for nothing.")
    return text
