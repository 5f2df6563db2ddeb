"""Fuzz grammars of every kind: each must compile or fail in bounded time and memory, without a crash.

`python -m tests.support.grammar_fuzzer [seconds] [first seed]` runs longer than the suite, which tries a few hundred,
and prints what it finds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from model.errors import GrammarError
from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import GrammarSpec, GrammarTask
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import CALL_FORMATS, CallSpec
from model.text.tool_calls.reader import Function
from service.gateway.grammars.pool import CompileLimits, GrammarPool, PackedTask
from tests.support.demo_engine import DEMO

CRASHED = "crashed its compiler"
PIECES = ("a", "b", ".", "\\d", "[a-z]", "[^a]", "(a|b)", "(?:xy)", "\\w", "é", "\\.", "[ab]")
REPEATS = ("", "", "*", "+", "?", "{3}", "{2,9}", "{0,40}", "{500}", "{1,1000}", "*?")
TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")
NUMBERS = (0, 1, -1, 3, 7, 0.5, 1e9, 1e-5, 2**53, 10**30, 9973, 0.1)
KEYWORDS = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "$ref",
    "pattern",
    "multipleOf",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "enum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "const",
    "type",
    "format",
    "required",
    "$defs",
    "unevaluatedProperties",
)


def regex(rng: random.Random, depth: int = 3) -> str:
    parts = []
    for _ in range(rng.randint(1, 5)):
        piece = rng.choice(PIECES)
        if depth and rng.random() < 0.3:
            piece = f"({regex(rng, depth - 1)}|{regex(rng, depth - 1)})" if rng.random() < 0.5 else f"({regex(rng, 0)})"
        parts.append(piece + rng.choice(REPEATS))
    return rng.choice(("", "^", ".*")) + "".join(parts) + rng.choice(("", "$", ".*"))


def schema(rng: random.Random, depth: int = 4) -> Any:
    if depth == 0 or rng.random() < 0.05:
        return rng.choice((True, {}, {"type": rng.choice(TYPES)}, {"$ref": reference(rng)}, {"pattern": regex(rng)}))
    found: dict[str, Any] = {}
    if rng.random() < 0.6:
        found["type"] = rng.choice(TYPES)
    for keyword in rng.sample(KEYWORDS, rng.randint(1, 5)):
        found[keyword] = _value(rng, keyword, depth)
    return found


def reference(rng: random.Random) -> str:
    return rng.choice(("#", f"#/$defs/{rng.choice('abc')}", "#/properties/a", "#/allOf/0", "#/nothing", "other.json"))


def _value(rng: random.Random, keyword: str, depth: int) -> Any:
    def one() -> Any:
        return schema(rng, depth - 1)

    def many(most: int = 4) -> list[Any]:
        return [one() for _ in range(rng.randint(1, rng.choice((most, most, 3 * most))))]

    if keyword in ("properties", "$defs", "dependentSchemas"):
        return dict(zip("abcdefgh", many(), strict=False))
    if keyword == "patternProperties":
        return {regex(rng): part for part in many(6)}
    if keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        return many()
    if keyword == "$ref":
        return reference(rng)
    if keyword == "pattern":
        return regex(rng)
    if keyword in ("enum", "required"):
        return [rng.choice(("a", "b", "c")) for _ in range(rng.randint(1, 3))]
    if keyword == "dependentRequired":
        return {"a": ["b"]}
    if keyword in ("type", "format"):
        return rng.choice((*TYPES, "date-time", "email", "uuid", "no such"))
    if keyword == "const":
        return rng.choice((1, "a", None, [], {"a": 1}))
    if keyword == "uniqueItems":
        return rng.random() < 0.5
    if keyword.startswith(("min", "max", "multiple", "exclusive")):
        return rng.choice(NUMBERS)
    return one()


def lark(rng: random.Random) -> str:
    rules, terminals = [f"r{i}" for i in range(rng.randint(1, 6))], [f"T{i}" for i in range(rng.randint(1, 6))]
    lines = [f"start: {_body(rng, rules + terminals)}"]
    lines += [f"{name}: {_body(rng, rules + terminals)}" for name in rules]
    for name in terminals:
        both = rng.choice(("", " & ", " | ", " & ~"))
        lines.append(f"{name}: /{regex(rng)}/" + (f"{both}/{regex(rng)}/" * rng.randint(1, 6) if both else ""))
    return "\n".join(lines)


def gbnf(rng: random.Random) -> str:
    names = [f"r{i}" for i in range(rng.randint(1, 6))]
    return "\n".join(f"{name} ::= {_body(rng, names)}" for name in ("root", *names))


def _body(rng: random.Random, names: list[str]) -> str:
    parts = [
        rng.choice((*names, '"x"', '"yz"')) + rng.choice(("", "", "*", "?", "+")) for _ in range(rng.randint(1, 5))
    ]
    return " ".join(f"({part})" if rng.random() < 0.2 else part + rng.choice(("", " |")) for part in parts) + ' "end"'


def task_of(seed: int) -> GrammarTask:
    rng = random.Random(seed)
    kind = rng.choice(("json", "json", "json", "json", "regex", "lark", "gbnf", "choice", "tools"))
    if kind == "json":
        return GrammarTask(GrammarSpec("json", schema(rng), rng.choice(("", " ?", regex(rng, 0))), rng.random() < 0.5))
    if kind == "regex":
        return GrammarTask(GrammarSpec("regex", regex(rng, 5)))
    if kind in ("lark", "gbnf"):
        return GrammarTask(GrammarSpec("grammar", lark(rng) if kind == "lark" else gbnf(rng)))
    if kind == "choice":
        return GrammarTask(GrammarSpec("choice", [regex(rng, 2) for _ in range(rng.choice((1, 9, 900)))]))
    functions = tuple(Function(name, schema(rng, 3), rng.random() < 0.5) for name in "fgh"[: rng.randint(1, 3)])
    form = rng.choice(sorted(CALL_FORMATS))
    calls = CallSpec(
        format=CALL_FORMATS[form],
        functions=functions,
        arguments_key="arguments",
        max_calls=rng.choice((1, 8)),
        or_text=rng.random() < 0.5,
        or_spec=False,
    )
    return GrammarTask(None, calls)


@dataclass(frozen=True)
class Verdict:
    seed: int
    text: str | None
    error: str
    elapsed_s: float

    @property
    def kind(self) -> str:
        if CRASHED in self.error or "panic" in self.error:
            return "crashed"
        if "takes more than" in self.error and self.error.endswith("to compile."):
            return "bounded"
        return "refused" if self.text is None else "compiled"


async def verdicts(seeds: Iterable[int], limits: CompileLimits) -> AsyncIterator[Verdict]:
    """Compile each grammar in a bounded process; return the results."""
    pool = GrammarPool(TokenTable.of(Tokenizer.read(DEMO), 4101, [1]), asyncio.get_running_loop().time, limits)
    pool.start()
    try:
        await pool.wait_until_ready()
        for seed in seeds:
            begin_s, text, error = time.monotonic(), None, ""
            try:
                text = await pool.compile(PackedTask.of(task_of(seed)), "fuzzer")
            except GrammarError as refused:
                error = str(refused)
            yield Verdict(seed, text, error, time.monotonic() - begin_s)
    finally:
        await pool.close()


async def search(seconds: float, first: int) -> bool:
    end_s, counts, is_good = time.monotonic() + seconds, Counter(), True
    seeds = iter(lambda: first + counts.total() if time.monotonic() < end_s else None, None)
    async for verdict in verdicts(seeds, CompileLimits()):
        kind = verdict.kind
        counts[kind] += 1
        if kind in ("crashed", "bounded"):
            is_good &= kind != "crashed"
            spec = task_of(verdict.seed).spec
            print(f"{verdict.seed}: {verdict.error}", json.dumps(spec and spec.value)[:300], flush=True)
    print(dict(counts))
    return is_good


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    sys.exit(0 if asyncio.run(search(given[0] if given else 60.0, int(given[1]) if given[1:] else 0)) else 1)
