"""The formats in which model families write function calls: detection from a template, and grammars that enforce them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from model.errors import GrammarError
from model.text.functions import Function
from model.text.grammar import HEADER, json_rule, literal
from model.text.tool_calls.python_call import argument_rules
from model.text.tool_calls.reader import BLANKS
from model.text.tool_calls.stream import CallSyntax
from model.text.tool_calls.xml_call import BEGIN, CALL_END, function_rules

MAX_FORCED_CALLS = 8
"""Calls that a grammar enforces in one reply: a model that never stops calling must stop."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """One family's format: `syntax` is what the stream reads, the rest what a grammar enforces."""

    syntax: CallSyntax
    before: str = ""  # text preceding a call
    after: str = ""
    between: str = ""  # two calls
    begin: str = ""  # after the opening, preceding the first call
    end: str = ""  # after the last call
    says_opening: bool = True  # before each call if `wraps_each`, else before the first
    wraps_each: bool = False
    short_ids: bool = False  # its template takes only ids of nine letters and digits


HERMES = CallForm(
    syntax=CallSyntax(openings=("<tool_call>",), closings=("</tool_call>",)),
    before="\n",
    after="\n",
    between="\n",
    wraps_each=True,
)
MISTRAL = CallForm(
    syntax=CallSyntax(openings=("[TOOL_CALLS]",), closings=("]",), fillers=BLANKS + "[,", bare_names=True),
    begin="[",
    between=", ",
    end="]",
    short_ids=True,
)
LLAMA3_JSON = CallForm(
    syntax=CallSyntax(openings=("<|python_tag|>",), fillers=BLANKS + ";,", bare="{", at_start_only=True),
    between="; ",
    says_opening=False,
)
QWEN3_CODER = CallForm(
    syntax=CallSyntax(openings=("<tool_call>",), closings=(CALL_END,), in_xml=True),
    before="\n",
    after="\n",
    between="\n",
    wraps_each=True,
)
LLAMA3_JSON_ANYWHERE = replace(LLAMA3_JSON, syntax=replace(LLAMA3_JSON.syntax, at_start_only=False))
PYTHONIC = CallForm(
    syntax=CallSyntax(
        openings=("<|python_start|>", "<|python_tag|>", "<function_calls>", "<|tool_call_start|>"),
        closings=("]", "<|python_end|>", "</function_calls>", "<|tool_call_end|>"),
        fillers=BLANKS + ",",
        bare="[",
        at_start_only=True,
        in_python=True,
    ),
    begin="[",
    between=", ",
    end="]",
    says_opening=False,
)
PYTHONIC_ANYWHERE = replace(PYTHONIC, syntax=replace(PYTHONIC.syntax, at_start_only=False))
FORMS: Mapping[str, CallForm] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama3_json_anywhere": LLAMA3_JSON_ANYWHERE,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "pythonic_anywhere": PYTHONIC_ANYWHERE,
    "qwen3_coder": QWEN3_CODER,
}
"""Formats by their names in vLLM's --tool-call-parser; `_anywhere`: calls without an opening may follow prose."""

SHOWN_PYTHONIC = re.compile(r"\[\s*\w+\(\w+\s*=|<function_calls>|<\|tool_call_start\|>")
"""Occurs in the template of a model that writes calls as Python: `[name(argument=...)]`, or tags around it."""


class SpecialTokens(Protocol):
    def special_id(self, text: str) -> int | None: ...


def form_of(template: str) -> CallForm:
    """Return the format that a chat template shows: models are trained on what their templates render."""
    if BEGIN in template:
        return QWEN3_CODER
    for form in (MISTRAL, HERMES):
        if form.syntax.openings[0] in template:
            return form
    return PYTHONIC if SHOWN_PYTHONIC.search(template) else LLAMA3_JSON


def arguments_key(template: str) -> str:
    """Return the template's key for a call's arguments."""
    return "parameters" if '"parameters"' in template and '"arguments"' not in template else "arguments"


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    key: str,
    tokens: SpecialTokens,
    *,
    most: int = MAX_FORCED_CALLS,
    or_text: bool = False,
    or_form: str | None = None,
) -> str:
    """Return the grammar of a reply of 1 to `most` function calls and nothing else.

    `or_text` allows any text, with valid calls in it. `or_form` allows a reply in another grammar instead, since
    without an opening it cannot be separated from a call. Raises GrammarError if a schema cannot be enforced.
    """
    rules = _reply_rules(form, tokens, most, or_text, or_form)
    for kind in ("function", "rest"):
        rules.append(f"{kind}: " + " | ".join(f"{kind}_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        try:
            rules += _call_rules(i, function, form, key, is_held=function.is_strict or not or_text)
        except GrammarError as error:
            raise GrammarError(f"Function '{function.name}': {error}") from None
    if or_text and form.syntax.bare and not form.syntax.at_start_only:
        rules.append("first: " + " | ".join(f"behind_{i} rest_{i}" for i in range(len(functions))))
        heads = [literal(form.begin + _head(function, form, key)) for function in functions]
        rules += [f"behind_{i}[lazy]: TEXT {head}" for i, head in enumerate(heads)]
    return HEADER + "\n".join(rules)


def _reply_rules(form: CallForm, tokens: SpecialTokens, most: int, or_text: bool, or_form: str | None) -> list[str]:
    """Return the rules of a whole reply, with calls as `function`."""
    opening, closing = (
        _marker(texts[0] if texts else "", tokens) for texts in (form.syntax.openings, form.syntax.closings)
    )
    call = f"{_text(form.before)} function {_text(form.after)} {closing if form.wraps_each else ''}"
    more = f"({_text(form.between)} {opening if form.wraps_each else ''} {call}){{0,{most - 1}}}" if most > 1 else ""
    calls = f"{_text(form.begin)} {call} {more} {_text(form.end)}"
    first = opening if form.says_opening else ""
    if or_form is not None:
        return [f"start: {first} {calls} | form", f"form: %lark {{\n{or_form.removeprefix(HEADER)}\n}}"]
    if or_text and form.syntax.bare:
        return _bare_text_rules(form, tokens, calls, f"{more} {_text(form.end)}")
    if or_text:
        return _text_rules(form, opening, closing, calls)
    return [f"start: {first} {calls}"]


def _bare_text_rules(form: CallForm, tokens: SpecialTokens, calls: str, rest: str) -> list[str]:
    """Text, or calls without an opening: text may contain nothing that can be read as a call."""
    bare = re.escape(form.syntax.bare)
    spelt = [re.escape(text) for text in form.syntax.openings if tokens.special_id(text) is None]
    if form.syntax.at_start_only:
        no_opening = rf" & ~/\s*({'|'.join(spelt)})(?s:.*)/" if spelt else ""
        return [f"start: {calls} | TEXT?", rf"TEXT: /\s*[^{bare}\s](?s:.*)/{no_opening}"]
    no_opening = rf" & ~/(?s:.*)({'|'.join(spelt)})(?s:.*)/" if spelt else ""
    no_call = rf"[^{bare}]|{bare}[^\s{NOT_IN_TEXT[form.syntax.bare]}]"
    return [f"start: (first {rest})* TEXT", f"TEXT: /({no_call})*/{no_opening}"]


def _text_rules(form: CallForm, opening: str, closing: str, calls: str) -> list[str]:
    """Text with calls anywhere in it, each after an opening, which text may not contain."""
    is_token = opening.startswith("<[")
    if not form.syntax.in_xml:
        head = f"head: TEXT {opening}" if is_token else f"head[lazy]: TEXT {opening}"
        return [f"start: (head {calls})* TEXT", head, "TEXT: /(?s:.*)/"]
    # `<function=` begins a call even without an opening. If the tags are special tokens, text cannot spell them.
    tags = f"| TEXT {opening} | TEXT {closing}" if is_token else ""
    return [f"start: (head rest {tags})* TEXT", f"head[lazy]: TEXT {literal(BEGIN)}", "TEXT: /(?s:.*)/"]


def _call_rules(i: int, function: Function, form: CallForm, key: str, *, is_held: bool) -> list[str]:
    """Return the rules of a call of function `i`. `is_held` enforces its schema on the arguments."""
    if form.syntax.in_xml:
        return function_rules(i, function, is_held=is_held)
    call = f"function_{i}: {literal(_head(function, form, key))} rest_{i}"
    if form.syntax.in_python:
        return [call, *argument_rules(i, function, is_held=is_held)]
    schema = function.parameters if is_held else {"type": "object"}
    return [
        call,
        f'rest_{i}: arguments_{i} "}}"',
        f"arguments_{i}: {json_rule(schema, whitespace=SPACED, lenient=not function.is_strict)}",
    ]


def _head(function: Function, form: CallForm, key: str) -> str:
    """Return the text of a call up to its arguments."""
    return f"{function.name}(" if form.syntax.in_python else f'{{"name": {literal(function.name)}, "{key}": '


NOT_IN_TEXT = {"{": '"', "[": "A-Za-z_"}
"""In text, the character that begins a bare run must not be followed by these or a blank."""

SPACED = " ?"
"""Blanks between the tokens of arguments, as models write them on one line."""


def _marker(text: str, tokens: SpecialTokens) -> str:
    """Return a marker as a Lark literal, or by its id if it is a special token, which text cannot spell."""
    if not text:
        return ""
    token_id = tokens.special_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def _text(text: str) -> str:
    return literal(text) if text else ""
