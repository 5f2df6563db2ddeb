"""Reader and grammar of function calls in Python syntax (Llama 3.2 and 4, OLMo, LFM2).

    [get_weather(city="Oslo", days=3), stop()]

Keyword arguments have literal values: strings, numbers, True, False, None, lists, tuples and dicts; also JSON's true,
false and null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence

from model.errors import GrammarError
from model.text.grammar import enforced_rule, literal
from model.text.json_schema.limits import check_schema
from model.text.json_schema.parameters import Parameter, json_parameters
from model.text.tool_calls.reader import BLANKS, CallReader, Function

MAX_NAME_CHARS = 256
MAX_SCALAR_CHARS = 1024
MAX_DEPTH = 200
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
ESCAPES |= {char: char for char in "\\'\"/"}
NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
HEX_DIGITS, OCTAL_DIGITS = "0123456789abcdefABCDEF", "01234567"
TUPLE = "tuple"
CLOSING = {"(": ")", "[": "]", "{": "}", TUPLE: ")"}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALAR = re.compile(r"[A-Za-z0-9_.+-]")
_KEYWORD = re.compile(r"[^\s()\[\]{}<>=,:;'\"]")
_FUNCTION = re.compile(r"[A-Za-z0-9_.-]")


class PythonCallReader(CallReader):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__(None, self._in_name)
        self._names = names
        self._word = ""  # a partial name or scalar
        self._seen: set[str] = set()
        self._stack: list[str] = []  # open brackets, the call's own first
        self._outputs = [self._arguments]  # JSON goes to the last; one per open parenthesis that may not be a tuple
        self._is_key = False  # reading a dict key
        self._string = ""  # delimiter of the current string
        self._quotes = ""  # quotes read at a string's start or end
        self._escape = ""
        self._surrogate = 0  # pending high surrogate

    def _in_name(self, char: str) -> None:
        if char == "(" and self._word:
            self.has_opened = True
            name, self._word = self._word.strip(), ""
            self.name = name if name in self._names else None
            self._stack.append("(")
            self._state = self._before_keyword
            return
        is_name = _FUNCTION.match(char) and not self._word.endswith(" ")
        self._word += char
        self.is_bad = not (is_name or (char == " " and self._word != " ")) or len(self._word) > MAX_NAME_CHARS

    def _before_keyword(self, char: str) -> None:
        if char == ")":
            self._arguments.append("}" if self._seen else "{}")
            self.is_done = True
        elif char not in BLANKS:
            self._state = self._in_keyword
            self._in_keyword(char)

    def _in_keyword(self, char: str) -> None:
        if char == "=" and self._word and self._word not in self._seen:
            self._has_arguments = True
            self._emit((", " if self._seen else "{") + _json(self._word) + ": ")
            self._seen.add(self._word)
            self._word, self._state = "", self._before_value
        elif char == " " and self._word:
            self._state = self._before_equals
        else:
            self._word += char
            self.is_bad = not _KEYWORD.match(char) or len(self._word) > MAX_NAME_CHARS

    def _before_equals(self, char: str) -> None:
        if char == "=":
            self._in_keyword(char)
        else:
            self.is_bad = char != " "

    def _before_value(self, char: str) -> None:
        if char in BLANKS:
            return
        if char in "'\"":
            self._begin_string(char)
        elif self._is_key and not (char.isalnum() or char in "+-."):
            self.is_bad = True
        elif char in "[{(":
            self._open_container(char)
        elif _SCALAR.match(char):
            self._word, self._state = char, self._in_scalar
        else:
            self.is_bad = True

    def _open_container(self, char: str) -> None:
        self._stack.append(char)
        self.is_bad = len(self._stack) > MAX_DEPTH
        if char == "(":
            self._outputs.append([])
        else:
            self._emit(char)
        self._state = self._before_first

    def _before_first(self, char: str) -> None:
        if char == CLOSING[self._stack[-1]]:
            if char == ")":
                self._begin_tuple()
            self._close_container()
        elif char not in BLANKS:
            self._next_item(char)

    def _after_comma(self, char: str) -> None:
        if char == CLOSING[self._stack[-1]]:
            self._close_container()
        elif char not in BLANKS:
            self._emit(", ")
            self._next_item(char)

    def _next_item(self, char: str) -> None:
        self._is_key = self._stack[-1] == "{"
        self._state = self._before_value
        self._before_value(char)

    def _after_value(self, char: str) -> None:
        is_argument = len(self._stack) == 1
        if char in BLANKS:
            return
        if self._is_key:
            self.is_bad, self._is_key = char != ":", False
            self._emit(": ")
            self._state = self._before_value
        elif char == "," and is_argument:
            self._state = self._before_keyword
        elif char == ",":
            if self._stack[-1] == "(":
                self._begin_tuple()
            self._state = self._after_comma
        elif char != CLOSING[self._stack[-1]]:
            self.is_bad = True
        elif is_argument:
            self._before_keyword(char)
        else:
            self._close_container()

    def _begin_tuple(self) -> None:
        """Mark the open parenthesis as a tuple: it has a comma, or is empty."""
        inner = self._outputs.pop()
        self._emit("[" + "".join(inner))
        self._stack[-1] = TUPLE

    def _close_container(self) -> None:
        bracket = self._stack.pop()
        if bracket == "(":
            inner = self._outputs.pop()
            self._emit("".join(inner))
        else:
            self._emit("}" if bracket == "{" else "]")
        self._state = self._after_value

    def _in_scalar(self, char: str) -> None:
        if _SCALAR.match(char) and len(self._word) < MAX_SCALAR_CHARS:
            self._word += char
            return
        value = _scalar_json(self._word)
        if value is None:
            self.is_bad = True
            return
        self._emit(_json(value) if self._is_key else value)
        self._word, self._state = "", self._after_value
        self._after_value(char)

    def _begin_string(self, char: str) -> None:
        self._string, self._quotes, self._state = char, char, self._in_string_start

    def _in_string_start(self, char: str) -> None:
        """Read after one or two quotes, to detect an empty string or triple quotes."""
        if char == self._string and len(self._quotes) == 1:
            self._quotes += char
            return
        self._emit('"')
        if char == self._string:
            self._string, self._quotes, self._state = self._string * 3, "", self._in_string
        elif len(self._quotes) == 2:
            self._end_string()
            self._after_value(char)
        else:
            self._quotes, self._state = "", self._in_string
            self._in_string(char)

    def _in_string(self, char: str) -> None:
        if char == self._string[0]:
            self._quotes += char
            if self._quotes == self._string:
                self._end_string()
            return
        for quote in self._quotes:
            self._emit_char(quote)
        self._quotes = ""
        if char == "\\":
            self._escape, self._state = "", self._in_escape
        else:
            self._emit_char(char)

    def _in_escape(self, char: str) -> None:
        self._escape += char
        kind, digits = self._escape[0], self._escape[1:]
        if kind in ESCAPES:
            self._end_escape(ESCAPES[kind])
        elif kind in NUM_HEX_DIGITS:
            self.is_bad = bool(digits) and char not in HEX_DIGITS
            if not self.is_bad and len(digits) == NUM_HEX_DIGITS[kind]:
                self._end_escape_at(int(digits, 16))
        elif kind in OCTAL_DIGITS:
            if char not in OCTAL_DIGITS:
                self._end_escape_at(int(self._escape[:-1], 8))
                self._in_string(char)
            elif len(self._escape) == 3:
                self._end_escape_at(int(self._escape, 8))
        elif kind == "N":
            self.is_bad = True
        else:
            self._emit_char("\\")
            self._end_escape(kind)

    def _end_escape_at(self, code: int) -> None:
        """Emit the character `code`; combine surrogate pairs, as in JSON."""
        self._state = self._in_string
        if 0xD800 <= code < 0xDC00 and not self._surrogate:
            self._surrogate = code
        elif 0xDC00 <= code < 0xE000 and self._surrogate:
            code = 0x10000 + (self._surrogate - 0xD800) * 0x400 + code - 0xDC00
            self._surrogate = 0
            self._emit_char(chr(code))
        elif code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self.is_bad = True
        else:
            self._emit_char(chr(code))

    def _end_escape(self, text: str) -> None:
        self._state = self._in_string
        if text:
            self._emit_char(text)

    def _emit_char(self, char: str) -> None:
        self.is_bad = self.is_bad or self._surrogate > 0
        self._emit(_json(char)[1:-1])

    def _end_string(self) -> None:
        self.is_bad = self.is_bad or self._surrogate > 0
        self._emit('"')
        self._quotes, self._state = "", self._after_value

    def _emit(self, text: str) -> None:
        self._outputs[-1].append(text)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _scalar_json(word: str) -> str | None:
    if word in WORDS:
        return WORDS[word]
    try:
        if _JSON_NUMBER.fullmatch(word):
            return word if math.isfinite(float(word)) else None
        if re.fullmatch(r"[+-]?[0-9_]+", word):
            return str(int(word))
        if re.fullmatch(r"0[xXoObB][0-9a-fA-F_]+", word):
            return str(int(word, 0))
        value = float(word)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


MAX_PROPERTIES = 128
"""Bounds the nesting of rules."""
ANY_STRING = r"""/"([^"\\\n]|\\["\\nrt])*"|'([^'\\\n]|\\['\\nrt])*'/"""
ANY_KEYWORD = "/[A-Za-z_][A-Za-z0-9_]{0,63}=/"


def argument_rules(number: int, function: Function, *, enforce_schema: bool) -> list[str]:
    """Return the Lark rules of a call after its opening parenthesis, `rest_<number>` first.

    Arguments follow the schema's order; values are JSON except True, False and None. Without `enforce_schema`, any
    arguments are allowed. Raises GrammarError.
    """
    own = f"rest_{number}"
    if not enforce_schema:
        return [
            f'{own}: ({own}_any (", " {own}_any)*)? ")"',
            f"{own}_any: {ANY_KEYWORD} {own}_value",
            f'{own}_value: {ANY_STRING} | /-?[0-9]{{1,20}}(\\.[0-9]{{1,20}})?/ | "True" | "False" | "None"'
            f' | "[" ({own}_value (", " {own}_value)*)? "]" | "{{" ({own}_item (", " {own}_item)*)? "}}"',
            f'{own}_item: {ANY_STRING} ": " {own}_value',
        ]
    check_schema(function.parameters)
    found = json_parameters(function.parameters, lenient=not function.is_strict)
    if missing := [each.name for each in found if each.is_required and not each.name.isidentifier()]:
        raise GrammarError(f"The argument {literal(missing[0])} is required but not a Python name.")
    named = [each for each in found if each.name.isidentifier()]
    if len(named) > MAX_PROPERTIES:
        raise GrammarError(f"A function may have at most {MAX_PROPERTIES} arguments.")
    return [f'{own}: {own}_first_0 ")"', *_argument_rules(own, named)]


def _argument_rules(own: str, found: Sequence[Parameter]) -> list[str]:
    """Return rules `first_<i>` (the first argument is the i-th or later) and `more_<i>` (after another argument)."""
    rules = []
    for place, each in enumerate(found):
        this, after = f"{own}_{place}", f"{own}_more_{place + 1}"
        for kind, comma in (("first", ""), ("more", '", " ')):
            or_not = "" if each.is_required else f" | {own}_{kind}_{place + 1}"
            rules.append(f"{own}_{kind}_{place}: {comma}{this} {after}{or_not}")
        rules.append(f"{this}: {literal(each.name + '=')} {this}_value")
        rules += _value_rules(f"{this}_value", each)
    return [*rules, *(f'{own}_{kind}_{len(found)}: ""' for kind in ("first", "more"))]


def _value_rules(rule: str, parameter: Parameter) -> list[str]:
    if parameter.choices is None and parameter.kinds == {"boolean"}:
        return [f'{rule}: "True" | "False"']
    if parameter.schema is None:
        raise TypeError("json_parameters: a parameter without a schema")
    none = ' | "None"' if parameter.may_be_null else ""
    return [f"{rule}: {rule}_json{none}", f"{rule}_json: {enforced_rule(parameter.schema, ' ?')}"]
