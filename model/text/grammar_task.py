"""Output constraints as plain values, turned into a grammar by another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import GrammarError
from model.text.grammar import HEADER, WHITESPACE, choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.tool_calls.formats import CallSpec, SpecialTokens, calls_grammar, marker


@dataclass(frozen=True)
class GrammarSpec:
    kind: str  # json | regex | choice | grammar
    value: Any
    whitespace: str = WHITESPACE  # between JSON tokens
    lenient: bool = False  # ignore unknown formats in a schema


@dataclass(frozen=True)
class ReasoningRule:
    """Free reasoning text before a constrained answer."""

    start: str
    end: str
    is_open: bool  # the prompt has `start`, or the model omits it; else reasoning is optional


@dataclass(frozen=True)
class GrammarTask:
    spec: GrammarSpec | None
    calls: CallSpec | None = None
    reasoning: ReasoningRule | None = None


_WRITERS: Mapping[str, Callable[[GrammarSpec], str]] = {
    "json": lambda spec: json_grammar(spec.value, whitespace=spec.whitespace, lenient=spec.lenient),
    "regex": lambda spec: regex_grammar(spec.value),
    "choice": lambda spec: choice_grammar(spec.value),
    "grammar": lambda spec: lark_grammar(spec.value),
}
SPEC_KINDS = tuple(_WRITERS)


def write_grammar(task: GrammarTask, tokens: SpecialTokens) -> str:
    """Return the grammar of `task`; a hostile task may take long. Raises GrammarError."""
    text = None if task.spec is None else _WRITERS[task.spec.kind](task.spec)
    if task.calls is not None:
        text = calls_grammar(task.calls, tokens, text if task.calls.or_spec else None)
    if text is None:
        raise GrammarError("The grammar asks for nothing.")
    return text if task.reasoning is None else _after_reasoning(task.reasoning, text, tokens)


def _after_reasoning(rule: ReasoningRule, grammar: str, tokens: SpecialTokens) -> str:
    start, end = marker(rule.start, tokens), marker(rule.end, tokens)
    is_token = end.startswith("<[")
    return HEADER + "\n".join(
        (
            f"start: {start}? thought gap answer" if rule.is_open else f"start: ({start} thought gap)? answer",
            f"thought: FREE {end}" if is_token else f"thought[lazy]: FREE {end}",
            "FREE: /(?s:.*)/",
            r"gap: /[ \t\r\n]{0,8}/",
            f"answer: %lark {{\n{grammar.removeprefix(HEADER)}\n}}",
        )
    )
