"""Reader and grammar of function calls as XML-like elements, as Qwen3-Coder writes them.

    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

A value is plain text between two line breaks; the function's schema determines its JSON type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from model.text.grammar import enforced_rule, literal
from model.text.json_schema.core import canonical_key, kinds_of_type
from model.text.json_schema.document import schema_error
from model.text.json_schema.limits import check_schema
from model.text.json_schema.parameters import TEXT_AMBIGUOUS, WRITTEN_ONE_BY_ONE, Parameter, parameters
from model.text.tool_calls.reader import BLANKS, CallReader, Function

BEGIN, END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CALL_END = "</tool_call>"  # also ends a function that lacks its end tag
TRUTHS = {"true": True, "false": False}
MAX_NAME_CHARS = 256
_NAME_START = re.compile(r"[A-Za-z0-9_.-]{0,64}>?")
VALUE_ENDS = frozenset((PARAMETER_END, PARAMETER, END))
VALUE_END_STARTS = frozenset(
    lead + marker[:length]
    for marker in (*VALUE_ENDS, BEGIN)
    for length in range(len(marker) + 1)
    for lead in ("", "\n")
)


class XmlCallReader(CallReader):
    """Ends a value at its end tag, the next parameter or the function's end; another function is an error."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        super().__init__(None, self._in_begin)
        self._schemas = schemas
        self._word = ""  # a partial tag or name
        self._parameter = ""
        self._seen: set[str] = set()
        self._is_text = False  # emit the value as it arrives
        self._value: list[str] = []  # a value that is not text, held until its end
        self._tail = ""  # of a value; may begin its end tag
        self._is_first_char = False  # of a value

    def _in_begin(self, char: str) -> None:
        self._word += char
        if self._word == BEGIN:
            self._word, self._state = "", self._in_name
        elif not BEGIN.startswith(self._word):
            self.is_bad = True

    def _in_name(self, char: str) -> None:
        if char != ">":
            self._read_name(char)
            return
        name, self._word, self._state = self._word.strip(), "", self._between
        self.name = name if name in self._schemas else None

    def _read_name(self, char: str) -> None:
        self._word += char
        self.is_bad = char in "<\n" or len(self._word) > MAX_NAME_CHARS

    def _between(self, char: str) -> None:
        if not self._word and char in BLANKS:
            return
        self._word += char
        if self._word in (END, CALL_END):
            self._finish()
        elif self._word == PARAMETER:
            self._begin_parameter()
        elif not any(marker.startswith(self._word) for marker in (END, CALL_END, PARAMETER)):
            self.is_bad = True

    def _begin_parameter(self) -> None:
        self._word, self._state, self._has_arguments = "", self._in_parameter, True

    def _finish(self) -> None:
        self._arguments.append("}" if self._seen else "{}")
        self.is_done = True

    def _in_parameter(self, char: str) -> None:
        if char != ">":
            self._read_name(char)
            return
        self._parameter, self._word = self._word.strip(), ""
        if self._parameter in self._seen:
            self.is_bad = True
            return
        self._is_text = self._types() == {"string"}
        self._arguments.append((", " if self._seen else "{") + json.dumps(self._parameter, ensure_ascii=False) + ": ")
        if self._is_text:
            self._arguments.append('"')
        self._seen.add(self._parameter)
        self._value, self._tail, self._is_first_char, self._state = [], "", True, self._in_value

    def _in_value(self, char: str) -> None:
        is_first, self._is_first_char = self._is_first_char, False
        if is_first and char == "\n":
            return
        if not self._tail and char not in "\n<":
            self._emit(char)
            return
        self._tail += char
        while not self._may_end():
            self._emit(self._tail[0])
            self._tail = self._tail[1:]
        marker = self._tail.removeprefix("\n")
        if marker in VALUE_ENDS or (marker.startswith(BEGIN) and marker.endswith(">")):
            self._end_value(marker)

    def _may_end(self) -> bool:
        if self._tail in VALUE_END_STARTS:
            return True
        head, begin, name = self._tail.partition(BEGIN)
        return bool(begin) and head in ("", "\n") and _NAME_START.fullmatch(name) is not None

    def _emit(self, char: str) -> None:
        if self._is_text:
            self._arguments.append(json.dumps(char, ensure_ascii=False)[1:-1])
        else:
            self._value.append(char)

    def _end_value(self, marker: str) -> None:
        self._state = self._between
        if marker.startswith(BEGIN):
            self.is_bad = True
            return
        self._arguments.append('"' if self._is_text else _as_json("".join(self._value), self._types()))
        if marker == PARAMETER:
            self._begin_parameter()
        elif marker != PARAMETER_END:
            self._finish()

    def _types(self) -> frozenset[str]:
        return frozenset({"string"}) if self.name is None else types_of(self._schemas[self.name], self._parameter)


def types_of(schema: Any, parameter: str) -> frozenset[str]:
    """Return a parameter's JSON types; only `string` if unspecified."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    own = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(own, schema, depth=8)) or frozenset({"string"})


def _types(own: Any, schema: Any, depth: int) -> set[str]:
    if not isinstance(own, Mapping) or depth == 0:
        return set()
    if isinstance(own.get("$ref"), str):
        return _types(_definition(schema, own["$ref"]), schema, depth - 1)
    found = own.get("type")
    if found is not None:
        return {each for each in (found if isinstance(found, list) else [found]) if isinstance(each, str)}
    values = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    lists = [own.get(key) for key in ("anyOf", "oneOf", "allOf")]
    branches = [branch for each in lists if isinstance(each, list) for branch in each]
    return {each for branch in branches for each in _types(branch, schema, depth - 1)}


def _definition(schema: Any, ref: str) -> Any:
    found = schema
    for step in ref.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}.get(type(value), "object")


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON; as a string if it is not JSON, or `types` has `string` but not its type."""
    plain = text.strip()
    try:
        value = TRUTHS[plain.lower()] if plain.lower() in TRUTHS else json.loads(plain)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    return encoded if fits or "string" not in types else json.dumps(text, ensure_ascii=False)


PARAMETER_BEGIN = r"/<parameter=[A-Za-z0-9_.-]{1,64}>\n/"
ANY_TEXT = "/(?s:.*)/"
NO_END = r"~/(?s:.*)(<\/parameter>|<parameter=|<\/function>|<function=[A-Za-z0-9_.-]{0,64}>)(?s:.*)/"


def function_rules(number: int, function: Function, *, enforce_schema: bool) -> list[str]:
    """Return the Lark rules of a call, first `function_<number>` (BEGIN and `rest_<number>`).

    Parameters follow the schema's order. Without `enforce_schema`, any are allowed. Raises GrammarError.
    """
    own = f"function_{number}"
    whole, rest = f"{own}: {literal(BEGIN)} rest_{number}", f"rest_{number}: {literal(f'{function.name}>' + chr(10))}"
    tail = literal(END)
    if not enforce_schema:
        end, any_value = literal(f"\n{PARAMETER_END}\n"), own.upper()
        return [
            whole,
            f"{rest} {any_value}* {tail}",
            f"{any_value}: {PARAMETER_BEGIN} {any_value}_TEXT {end}",
            f"{any_value}_TEXT: {ANY_TEXT} & {NO_END}",
        ]
    check_schema(function.parameters)
    body, rules = [], []
    for place, parameter in enumerate(parameters(function.parameters, lenient=not function.is_strict)):
        rule = f"{own}_{place}"
        body.append(rule if parameter.is_required else f"{rule}?")
        rules.append(f"{rule}: {literal(f'{PARAMETER}{parameter.name}>' + chr(10))} {rule}_value")
        rules += _value_rules(f"{rule}_value", parameter, types_of(function.parameters, parameter.name))
    return [whole, f"{rest} {' '.join(body)} {tail}", *rules]


def _value_rules(rule: str, parameter: Parameter, types: frozenset[str]) -> list[str]:
    end = literal(f"\n{PARAMETER_END}\n")
    if parameter.choices is not None:
        texts = [text for choice in parameter.choices if (text := _text_of(choice, types)) is not None]
        if len(texts) < len(parameter.choices):
            raise schema_error("enum", parameter.at, TEXT_AMBIGUOUS)
        return [f"{rule}: ({' | '.join(map(literal, texts))}) {end}"]
    read_as = frozenset().union(*map(kinds_of_type, types))
    if parameter.schema is not None:
        if not parameter.kinds <= read_as:
            raise schema_error("type", parameter.at, f"must list the allowed types: {WRITTEN_ONE_BY_ONE}")
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: {enforced_rule(parameter.schema, ' ?')}"]
    if not read_as <= parameter.kinds:
        raise schema_error("type", parameter.at, TEXT_AMBIGUOUS)
    bounds = [f"/(?s:.{{{rule.least},{'' if rule.most is None else rule.most}}})/" for rule in parameter.rules or ()]
    patterns = [_whole(rule.pattern, parameter.at) for rule in parameter.rules or () if rule.pattern is not None]
    name = rule.upper()
    return [
        f"{rule}: {name}",
        f"{name}: {name}_TEXT {end}",
        f"{name}_TEXT: {' & '.join(dict.fromkeys([ANY_TEXT, *bounds, *patterns, NO_END]))}",
    ]


ENDS = re.compile("|".join(map(re.escape, (*VALUE_ENDS, BEGIN))))


def _text_of(choice: Any, types: frozenset[str]) -> str | None:
    """Return the text that reads back as the same value, if any."""
    text = choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False)
    encoded = json.dumps(text) if types == {"string"} else _as_json(text, types)
    is_same = not ENDS.search(text) and canonical_key(json.loads(encoded)) == canonical_key(choice)
    return text if is_same else None


def _whole(pattern: str, at: str) -> str:
    inner = pattern.removeprefix("^")
    num_backslashes = len(inner[:-1]) - len(inner[:-1].rstrip("\\"))
    ends = inner.endswith("$") and num_backslashes % 2 == 0
    inner = inner[:-1] if ends else inner
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    if re.search(r"[$^]|\\[bBAz]", plain) or ("|" in plain and (ends or inner != pattern)):
        raise schema_error("pattern", at, WRITTEN_ONE_BY_ONE)
    before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"/{before}(?:{regex_to_lark(inner, 'dw')}){after}/"
