"""The wanted form of an answer as plain values, which another process turns into a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.text.functions import Function
from model.text.grammar import WHITESPACE, GrammarError, of_choice, of_grammar, of_json, of_regex
from model.text.tool_calls.formats import CallForm, SpecialTokens, calls_grammar


@dataclass(frozen=True)
class GrammarSpec:
    """A form of text: `value` is a JSON schema, a regular expression, a list of texts or a grammar, by `kind`."""

    kind: str  # json | regex | choice | grammar
    value: Any
    whitespace: str = WHITESPACE  # between the tokens of JSON
    lenient: bool = False  # ignore unknown keywords of a schema


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """Function calls, as `calls_grammar` takes them."""

    form: CallForm
    functions: tuple[Function, ...]
    key: str
    most: int
    or_text: bool  # a reply may call nothing
    or_form: bool  # a reply without calls has the task's form


@dataclass(frozen=True)
class GrammarTask:
    """A form, calls, or either of them."""

    form: GrammarSpec | None
    calls: CallSpec | None = None


_WRITERS: Mapping[str, Callable[[GrammarSpec], str]] = {
    "json": lambda spec: of_json(spec.value, whitespace=spec.whitespace, lenient=spec.lenient),
    "regex": lambda spec: of_regex(spec.value),
    "choice": lambda spec: of_choice(spec.value),
    "grammar": lambda spec: of_grammar(spec.value),
}
SPEC_KINDS = tuple(_WRITERS)


def write_grammar(task: GrammarTask, tokens: SpecialTokens) -> str:
    """Return the grammar of `task`. A hostile one may take long. Raises GrammarError."""
    form = None if task.form is None else _WRITERS[task.form.kind](task.form)
    calls = task.calls
    if calls is None:
        if form is None:
            raise GrammarError("The grammar asks for nothing.")
        return form
    return calls_grammar(
        calls.form,
        calls.functions,
        calls.key,
        tokens,
        most=calls.most,
        or_text=calls.or_text,
        or_form=form if calls.or_form else None,
    )
