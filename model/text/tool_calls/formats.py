"""Function call formats of model families: detection from chat templates, and grammars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from model.errors import GrammarError
from model.text.grammar import HEADER, json_rule, literal
from model.text.tool_calls.python_call import argument_rules
from model.text.tool_calls.reader import BLANKS, Function
from model.text.tool_calls.stream import CallSyntax
from model.text.tool_calls.xml_call import BEGIN, CALL_END, function_rules

MAX_FORCED_CALLS = 8
"""Max enforced calls per reply, as a model might never stop calling."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """One family's format: the stream parser needs only `syntax`, grammars also the rest."""

    syntax: CallSyntax
    before: str = ""  # text before each call
    after: str = ""
    between: str = ""  # text between two calls
    begin: str = ""  # between the opening and the first call
    end: str = ""  # after the last call
    writes_opening: bool = True  # before each call if `wraps_each`, else before the first
    wraps_each: bool = False
    short_ids: bool = False  # the template accepts only ids of nine letters and digits


HERMES = CallFormat(
    syntax=CallSyntax(openings=("<tool_call>",), closings=("</tool_call>",)),
    before="\n",
    after="\n",
    between="\n",
    wraps_each=True,
)
MISTRAL = CallFormat(
    syntax=CallSyntax(openings=("[TOOL_CALLS]",), closings=("]",), fillers=BLANKS + "[,", bare_names=True),
    begin="[",
    between=", ",
    end="]",
    short_ids=True,
)
GRANITE = replace(
    MISTRAL,
    syntax=CallSyntax(openings=("<|tool_call|>", "<tool_call>"), closings=("]",), fillers=BLANKS + "[,"),
    short_ids=False,
)
PHI4_MINI_JSON = replace(
    GRANITE,
    syntax=replace(
        GRANITE.syntax,
        openings=("functools[", "<|tool_call|>", "<|tool_calls|>"),
        closings=("]", "<|/tool_call|>", "<|/tool_calls|>"),
    ),
    begin="",
)
LLAMA3_JSON = CallFormat(
    syntax=CallSyntax(openings=("<|python_tag|>",), fillers=BLANKS + ";,", bare="{", at_start_only=True),
    between="; ",
    writes_opening=False,
)
QWEN3_CODER = CallFormat(
    syntax=CallSyntax(openings=("<tool_call>",), closings=(CALL_END,), in_xml=True),
    before="\n",
    after="\n",
    between="\n",
    wraps_each=True,
)
SEED_OSS = replace(
    QWEN3_CODER, syntax=replace(QWEN3_CODER.syntax, openings=("<seed:tool_call>",), closings=("</seed:tool_call>",))
)
LLAMA3_JSON_ANYWHERE = replace(LLAMA3_JSON, syntax=replace(LLAMA3_JSON.syntax, at_start_only=False))
PYTHONIC = CallFormat(
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
    writes_opening=False,
)
PYTHONIC_ANYWHERE = replace(PYTHONIC, syntax=replace(PYTHONIC.syntax, at_start_only=False))
CALL_FORMATS: Mapping[str, CallFormat] = {
    "granite": GRANITE,
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama3_json_anywhere": LLAMA3_JSON_ANYWHERE,
    "mistral": MISTRAL,
    "phi4_mini_json": PHI4_MINI_JSON,
    "pythonic": PYTHONIC,
    "pythonic_anywhere": PYTHONIC_ANYWHERE,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
}
"""Formats by vLLM's --tool-call-parser names; in `_anywhere`, bare calls may follow prose."""

SHOWN_MARKS = {"functools": PHI4_MINI_JSON, "<|tool_call|>": GRANITE, "[TOOL_CALLS]": MISTRAL, "<tool_call>": HERMES}
"""Formats by a string in their templates, most specific first."""

SHOWN_PYTHONIC = re.compile(r"\[\s*\w+\(\w+\s*=|<function_calls>|<\|tool_call_start\|>")
"""Matches templates with Python calls."""


class SpecialTokens(Protocol):
    def special_id(self, text: str) -> int | None: ...


def detect_format(template: str) -> CallFormat:
    """Return the format that a chat template renders."""
    if BEGIN in template:
        return SEED_OSS if SEED_OSS.syntax.openings[0] in template else QWEN3_CODER
    for mark, call_format in SHOWN_MARKS.items():
        if mark in template:
            return call_format
    return PYTHONIC if SHOWN_PYTHONIC.search(template) else LLAMA3_JSON


def detect_arguments_key(template: str) -> str:
    return "parameters" if '"parameters"' in template and '"arguments"' not in template else "arguments"


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    format: CallFormat
    functions: tuple[Function, ...]
    arguments_key: str
    max_calls: int = MAX_FORCED_CALLS
    or_text: bool = False  # the reply may have no call
    or_spec: bool = False  # a reply without calls matches the task's `spec`


def calls_grammar(spec: CallSpec, tokens: SpecialTokens, or_grammar: str | None = None) -> str:
    """Return the grammar of function calls, alternatively of `or_grammar`. Raises GrammarError."""
    call_format, functions = spec.format, spec.functions
    rules = _reply_rules(spec, tokens, or_grammar)
    for kind in ("function", "rest"):
        rules.append(f"{kind}: " + " | ".join(f"{kind}_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        try:
            rules += _call_rules(i, function, spec)
        except GrammarError as error:
            raise GrammarError(f"Function '{function.name}': {error}") from None
    if spec.or_text and call_format.syntax.bare and not call_format.syntax.at_start_only:
        rules.append("first: " + " | ".join(f"behind_{i} rest_{i}" for i in range(len(functions))))
        heads = [literal(call_format.begin + _call_start(function, spec)) for function in functions]
        rules += [f"behind_{i}[lazy]: TEXT {head}" for i, head in enumerate(heads)]
    return HEADER + "\n".join(rules)


def _reply_rules(spec: CallSpec, tokens: SpecialTokens, or_grammar: str | None) -> list[str]:
    call_format, syntax = spec.format, spec.format.syntax
    opening, closing = (marker(texts[0] if texts else "", tokens) for texts in (syntax.openings, syntax.closings))
    call = f"{_text(call_format.before)} function {_text(call_format.after)}"
    call += f" {closing}" if call_format.wraps_each else " "
    more = ""
    if spec.max_calls > 1:
        next_opening = opening if call_format.wraps_each else ""
        more = f"({_text(call_format.between)} {next_opening} {call}){{0,{spec.max_calls - 1}}}"
    calls = f"{_text(call_format.begin)} {call} {more} {_text(call_format.end)}"
    first = opening if call_format.writes_opening else ""
    if or_grammar is not None:
        return [f"start: {first} {calls} | form", f"form: %lark {{\n{or_grammar.removeprefix(HEADER)}\n}}"]
    if spec.or_text and syntax.bare:
        return _bare_text_rules(syntax, tokens, calls, f"{more} {_text(call_format.end)}")
    if spec.or_text:
        return _text_rules(syntax, opening, closing, calls)
    return [f"start: {first} {calls}"]


def _bare_text_rules(syntax: CallSyntax, tokens: SpecialTokens, calls: str, rest: str) -> list[str]:
    """Return rules for text or bare calls; text cannot be read as a call."""
    bare = re.escape(syntax.bare)
    spelt = [re.escape(text) for text in syntax.openings if tokens.special_id(text) is None]
    if syntax.at_start_only:
        no_opening = rf" & ~/\s*({'|'.join(spelt)})(?s:.*)/" if spelt else ""
        return [f"start: {calls} | TEXT?", rf"TEXT: /\s*[^{bare}\s](?s:.*)/{no_opening}"]
    no_opening = rf" & ~/(?s:.*)({'|'.join(spelt)})(?s:.*)/" if spelt else ""
    no_call = rf"[^{bare}]|{bare}[^\s{NOT_IN_TEXT[syntax.bare]}]"
    return [f"start: (first {rest})* TEXT", f"TEXT: /({no_call})*/{no_opening}"]


def _text_rules(syntax: CallSyntax, opening: str, closing: str, calls: str) -> list[str]:
    """Return rules for text with calls, each after an opening; text may not contain openings."""
    is_token = opening.startswith("<[")
    if not syntax.in_xml:
        head = f"head: TEXT {opening}" if is_token else f"head[lazy]: TEXT {opening}"
        return [f"start: (head {calls})* TEXT", head, "TEXT: /(?s:.*)/"]
    # `<function=` begins a call even without an opening. Text cannot spell tags that are special tokens.
    tags = f"| TEXT {opening} | TEXT {closing}" if is_token else ""
    return [f"start: (head rest {tags})* TEXT", f"head[lazy]: TEXT {literal(BEGIN)}", "TEXT: /(?s:.*)/"]


def _call_rules(i: int, function: Function, spec: CallSpec) -> list[str]:
    syntax, enforce_schema = spec.format.syntax, function.is_strict or not spec.or_text
    if syntax.in_xml:
        return function_rules(i, function, enforce_schema=enforce_schema)
    call = f"function_{i}: {literal(_call_start(function, spec))} rest_{i}"
    if syntax.in_python:
        return [call, *argument_rules(i, function, enforce_schema=enforce_schema)]
    schema = function.parameters if enforce_schema else {"type": "object"}
    return [
        call,
        f'rest_{i}: arguments_{i} "}}"',
        f"arguments_{i}: {json_rule(schema, whitespace=SPACED, lenient=not function.is_strict)}",
    ]


def _call_start(function: Function, spec: CallSpec) -> str:
    if spec.format.syntax.in_python:
        return f"{function.name}("
    return f'{{"name": {literal(function.name)}, "{spec.arguments_key}": '


NOT_IN_TEXT = {"{": '"', "[": "A-Za-z_"}
"""Characters that, like blanks, may not follow the first character of a bare run within text."""

SPACED = " ?"
"""Whitespace in arguments, as models write it."""


def marker(text: str, tokens: SpecialTokens) -> str:
    """Return a marker in Lark: a literal, or a special token's id, which text cannot spell."""
    if not text:
        return ""
    token_id = tokens.special_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def _text(text: str) -> str:
    return literal(text) if text else ""
