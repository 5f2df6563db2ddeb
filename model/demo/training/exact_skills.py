"""Chats with computed answers: sums, counting, lists, reading, JSON and tool calls."""

from __future__ import annotations

import json
from random import Random

from story_maker import StoryMaker

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
BIGGEST_SUM = 20
TOO_BIG = (
    "That is too big for me. I only count to twenty.",
    "Those numbers are too big for me. I can add up to twenty.",
)
WORDS_OF = {"+": "plus", "-": "minus", "*": "times"}
TOOLS = (
    ("get_weather", "Get the weather in a city", ("city",), ("What is the weather in {city}?", "Weather in {city}?")),
    ("get_time", "Get the time in a city", ("city",), ("What time is it in {city}?", "Time in {city}")),
    ("add", "Add two numbers", ("a", "b"), ("What is {a} + {b}?", "Add {a} and {b}.", "{a} plus {b}")),
    ("search", "Search for something", ("query",), ("Search for {query}.", "Find something about {query}.")),
    ("send_letter", "Send a letter", ("to", "text"), ("Send {to} a letter: {text}", "Write to {to}: {text}")),
    ("find_thing", "Find a lost thing", ("thing",), ("I lost my {thing}.", "Where is my {thing}?")),
    ("light_lantern", "Light a lantern", ("colour",), ("Light the {colour} lantern.", "{colour} light, please")),
)

Turn = tuple[str, str]  # what the user says, what the model answers


class ExactSkills:
    def __init__(self, maker: StoryMaker) -> None:
        self.maker = maker
        self.grammar = maker.grammar

    def sum(self, rng: Random) -> list[Turn]:
        operator = rng.choice("+++--*")
        a, b = rng.randint(0, BIGGEST_SUM), rng.randint(0, BIGGEST_SUM)
        if rng.random() < 0.85:
            a, b = _fitting(operator, rng)
        result = {"+": a + b, "-": a - b, "*": a * b}[operator]
        in_words = rng.random() < 0.3
        context = {"op": WORDS_OF[operator] if in_words or rng.random() < 0.3 else operator}
        context |= {name: _number(value, in_words) for name, value in (("a", a), ("b", b), ("c", result))}
        tight = not in_words and context["op"] == operator and rng.random() < 0.2
        ask = self.grammar.expand("ask.sum.tight" if tight else "ask.sum", context, rng)
        if result > BIGGEST_SUM:
            return [(ask, rng.choice(TOO_BIG))]
        return [(ask, self.grammar.text("say.less" if result < 0 else "say.sum", context, rng))]

    def big_sum(self, rng: Random) -> list[Turn]:
        a, b = rng.randint(0, 5000), rng.randint(21, 5000)
        context = {"a": str(a), "b": str(b), "op": rng.choice("+-*/")}
        return [(self.grammar.expand("ask.sum", context, rng), rng.choice(TOO_BIG))]

    def quantity(self, rng: Random) -> list[Turn]:
        kind, (a, b) = rng.choice((("more", _fitting("+", rng)), ("less", _fitting("-", rng))))
        in_words = rng.random() < 0.4
        context = self.maker.free_context(rng) | {"many": self.grammar.expand("many.things", {}, rng)}
        result = a + b if kind == "more" else a - b
        if 1 in (a, b, result):
            return self.quantity(rng)
        context |= {name: _number(value, in_words) for name, value in (("a", a), ("b", b), ("c", result))}
        return [(self.grammar.text(f"ask.{kind}", context, rng), self.grammar.text("say.count", context, rng))]

    def bigger(self, rng: Random) -> list[Turn]:
        a, b = rng.sample(range(BIGGEST_SUM + 1), 2)
        in_words = rng.random() < 0.3
        values = {"a": a, "b": b, "big": max(a, b), "low": min(a, b)}
        context = {name: _number(value, in_words) for name, value in values.items()}
        return [(self.grammar.text("ask.bigger", context, rng), self.grammar.text("say.bigger", context, rng))]

    def count(self, rng: Random) -> list[Turn]:
        last = rng.randint(3, BIGGEST_SUM)
        first = rng.choice((1, 1, rng.randint(1, last - 1)))
        in_words = rng.random() < 0.3
        numbers = [_number(value, in_words) for value in range(first, last + 1)]
        start, end = numbers[0], numbers[-1]
        if first == 1 and rng.random() < 0.3:
            ask = rng.choice((f"Count backwards from {end}.", f"Count down from {end}."))
            return [(ask, ", ".join(reversed(numbers)))]
        here = f"from {start} to {end}" if first > 1 or rng.random() < 0.3 else f"to {end}"
        ask = rng.choice((f"Count {here}.", f"Count {here}", f"Can you count {here}?", f"Please count {here}."))
        return [(ask, ", ".join(numbers))]

    def reading(self, rng: Random) -> list[Turn]:
        question = rng.choice(("what", "who", "colour"))
        one, two = (self.maker.name_for("", rng.choice(("he", "she")), rng) for _ in range(2))
        t1, t2 = (self.maker.pick("thing", rng) for _ in range(2))
        c1, c2 = rng.sample(self.grammar.lines["colour"], 2)
        context = {"one": one, "two": two, "t1": t1, "t2": t2, "c1": c1, "c2": c2}
        ask = self.grammar.text(f"ask.read.{question}", context, rng)
        return [(ask, self.grammar.text(f"say.read.{question}", context, rng))]

    def listing(self, rng: Random) -> list[Turn]:
        section, one, many = rng.choice(self.grammar.table("kind.of"))
        a, b, c = (self.grammar.expand(section, {}, rng) for _ in range(3))
        if len({a, b, c}) < 3:
            return self.listing(rng)
        context = {"a": a, "b": b, "c": c, "one": one, "many": many}
        number = rng.choice(("list", "list", "one"))
        if one in ("season", "feeling", "food", "drink", "name"):
            number = "list"
        return [(self.grammar.text(f"{number}.ask", context, rng), self.grammar.text(f"{number}.say", context, rng))]

    def json_object(self, rng: Random) -> list[Turn]:
        sections = {
            "name": "pet",
            "animal": "animal",
            "colour": "colour",
            "thing": "thing",
            "food": "fruit",
            "place": "place",
            "friend": "girl",
            "color": "colour",
        }
        names = rng.sample([*sections, "age", "happy"], rng.randint(1, 4))
        record = {name: self._json_value(name, sections, rng) for name in names}
        listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        asks = (
            f"Give me a JSON object with {listed}.",
            f"Answer in JSON with the fields {listed}.",
            f"Write JSON with {listed}.",
            f"Make up a {rng.choice(('person', 'hero', 'animal'))} as JSON: {listed}.",
            f"Return only JSON. Fields: {', '.join(names)}",
            f"Describe a story as JSON with the keys {listed}.",
        )
        if rng.random() < 0.2:
            colours = rng.sample(self.grammar.lines["colour"], 3)
            return [("Give me a JSON list of three colours.", json.dumps(colours))]
        return [(rng.choice(asks), json.dumps(record, ensure_ascii=False))]

    def _json_value(self, name: str, sections: dict[str, str], rng: Random) -> str | int | bool:
        if name == "age":
            return rng.randint(1, 20)
        return rng.random() < 0.8 if name == "happy" else self.grammar.expand(sections[name], {}, rng)

    def emoji(self, rng: Random) -> list[Turn]:
        *words, sign = rng.choice(self.grammar.lines["emoji"]).split()
        thing = " ".join(words)
        asks = (f"Show me a {thing} emoji.", f"{thing} emoji", f"Emoji for {thing}?", f"What is the emoji for {thing}?")
        return [(rng.choice(asks), sign)]

    def tool_call(self, rng: Random) -> tuple[list[dict], str, str]:
        """Tools on offer, a question that fits one of them, and the call as JSON."""
        offered = rng.sample(TOOLS, rng.randint(1, 3))
        name, _, parameters, asks = rng.choice(offered)
        values = {parameter: self._tool_value(parameter, rng) for parameter in parameters}
        call = json.dumps({"name": name, "arguments": values}, ensure_ascii=False)
        return [tool_schema(*tool[:3]) for tool in offered], rng.choice(asks).format(**values), call

    def _tool_value(self, parameter: str, rng: Random) -> str | int:
        if parameter in ("a", "b"):
            return rng.randint(0, 99)
        if parameter == "city":
            known = rng.choice(self.grammar.table("table.capital"))[1]
            return rng.choice((known, self.maker.made_up_word(rng).capitalize()))
        sections = {"query": "big.topic", "to": "girl", "text": "greeting", "thing": "thing", "colour": "colour"}
        return self.grammar.expand(sections[parameter], {}, rng)


def tool_schema(name: str, description: str, parameters: tuple[str, ...]) -> dict:
    """A tool as the chat API writes it."""
    properties = {parameter: {"type": "integer" if len(parameter) == 1 else "string"} for parameter in parameters}
    function = {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def _fitting(operator: str, rng: Random) -> tuple[int, int]:
    """Two numbers whose sum, difference or product stays between 0 and BIGGEST_SUM."""
    if operator == "*":
        a = rng.randint(0, 10)
        return a, rng.randint(0, min(10, BIGGEST_SUM // a if a else 10))
    whole = rng.randint(0, BIGGEST_SUM)
    part = rng.randint(0, whole)
    return (part, whole - part) if operator == "+" else (whole, part)


def _number(value: int, in_words: bool) -> str:
    return NUMBERS[value] if in_words and 0 <= value < len(NUMBERS) else str(value)
