"""Print what users, clients and operators can name in a checkout, one sorted line each, so that two checkouts can be
compared:

    git worktree add --detach /tmp/old 2578fac
    diff <(python -m tests.support.public_surface --tree /tmp/old) <(python -m tests.support.public_surface)

Lines are verbs, flags, QUIRE_ variables, routes, JSON fields of bodies, metric names, worker statistics, Redis keys and
fields of messages. Types of messages are not on the wire, so each is printed as its fields alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
METRIC = re.compile(r"^(?:quire|vllm):[a-z_]+$")
STATISTIC = re.compile(r"^STAT_|^_?STATS?$|^_gauge$|^_counter$")
VARIABLE = re.compile(r"^QUIRE_[A-Z_]+$")
LUA_KEY = re.compile(r"\{quire\}:[\w:.<>*{}-]*[\w>}]")
METHODS = ("get", "post", "put", "patch", "delete")
WEB_METHODS = tuple(f"web.{method}" for method in METHODS)
STATISTIC_ROWS = ("_gauge", "_counter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="the checkout (default: this one)")
    tree = parser.parse_args().tree.resolve()
    if os.environ.get("PYTHONPATH") != str(tree) or Path.cwd() != tree:
        # Modules of both checkouts have the same names: each is read by a Python of its own.
        command = [sys.executable, str(Path(__file__).resolve()), "--tree", str(tree)]
        sys.exit(subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=False).returncode)
    lines = {*command_line(), *variables(tree), *routes(tree), *body_fields(tree), *metrics(tree)}
    lines |= {*redis_keys(tree), *message_fields(tree)}
    print("\n".join(sorted(lines)))


def command_line() -> Iterator[str]:
    """Yield each verb and each of its arguments, as the parser of `quire` knows them."""
    try:
        from service.cli.parser import make_parser
    except ImportError:  # an older tree
        from service.cli.main import make_parser
    yield from _arguments(make_parser(), "quire")


def _arguments(parser: argparse.ArgumentParser, verb: str) -> Iterator[str]:
    yield f"verb {verb}"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _arguments(inner, f"{verb} {name}")
            continue
        for name in action.option_strings or [str(action.metavar or action.dest)]:
            yield f"flag {verb} {name}"


def variables(tree: Path) -> Iterator[str]:
    for field in dataclasses.fields(_module_with(tree, "class Settings:").Settings):
        yield f"variable QUIRE_{field.name.upper()}"
    for text in strings(tree, "service", "model"):
        if VARIABLE.match(text):
            yield f"variable {text}"


def routes(tree: Path) -> Iterator[str]:
    """Yield `METHOD path` of each `Route(method, path, ...)`, in older trees of each aiohttp `web.get(path, ...)`."""
    for path in sources(tree, "service/gateway"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, method = ast.unparse(node.func), ast.unparse(node.args[0]).strip("'") if node.args else ""
            if name == "Route" and method.lower() in METHODS:
                yield f"route {method} {_evaluated(path, node.args[1], tree)}"
            elif name in WEB_METHODS and node.args:
                yield f"route {name.removeprefix('web.').upper()} {_evaluated(path, node.args[0], tree)}"


def _evaluated(path: Path, node: ast.expr, tree: Path) -> str:
    try:
        return str(eval(ast.unparse(node), dict(vars(_module(path, tree)))))
    except NameError:  # the variable of a comprehension
        return ast.unparse(node)


def body_fields(tree: Path) -> Iterator[str]:
    """Yield each property of each body in the OpenAPI document, down to where a schema repeats itself."""
    document = _module_with(tree, "def openapi_document(").openapi_document("1", "model", keys_required=True)
    for route, methods in document["paths"].items():
        for method, operation in methods.items():
            place = f"{method.upper()} {route}"
            for parameter in operation.get("parameters", ()):
                yield f"field {place} {parameter['in']} {parameter['name']}"
            yield from _properties(document, operation.get("requestBody", {}), f"field {place} request", ())
            for status, response in operation["responses"].items():
                if status.startswith("2"):
                    yield from _properties(document, response, f"field {place} {status}", ())


def _properties(document: dict[str, Any], node: Any, place: str, above: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, list):
        for each in node:
            yield from _properties(document, each, place, above)
    if not isinstance(node, dict):
        return
    reference = node.get("$ref")
    if reference is not None:
        if reference not in above:
            target = document
            for part in reference.removeprefix("#/").split("/"):
                target = target[part]
            yield from _properties(document, target, place, (*above, reference))
        return
    for name, schema in (node.get("properties") or {}).items():
        yield f"{place} .{name}"
        yield from _properties(document, schema, f"{place} .{name}", above)
    for key, value in node.items():
        if key not in ("properties", "example", "examples", "default"):
            yield from _properties(document, value, place, above)


def metrics(tree: Path) -> Iterator[str]:
    """Yield every metric name in the sources, and every statistic that a worker's card may hold."""
    for text in strings(tree, "service"):
        if METRIC.match(text):
            yield f"metric {text}"
    for path in sources(tree, "service"):
        for node in ast.walk(ast.parse(path.read_text())):
            name, value = None, None
            if isinstance(node, ast.Assign):
                name, value = node.targets[0], node.value
            elif isinstance(node, ast.Call) and node.args:
                name, value = node.func, node.args[0]
            if isinstance(name, ast.Name) and STATISTIC.match(name.id) and isinstance(value, ast.Constant):
                yield f"statistic {value.value}"


def redis_keys(tree: Path) -> Iterator[str]:
    """Yield every key, with * in place of names; scripts write <name> there."""
    found = [text for text in strings(tree, "service") if text.startswith("{quire}:") and not re.search(r"\s", text)]
    for path in sorted((tree / "service").rglob("*.lua")):
        found += [re.sub(r"<[^>]*>", "*", key) for key in LUA_KEY.findall(path.read_text())]
    yield from (f"key {text}" for text in found)


def message_fields(tree: Path) -> Iterator[str]:
    for node in ast.parse(_path_with(tree, "class WorkerCard").read_text()).body:
        if isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            names = [target.id for target in fields if isinstance(target, ast.Name)]
            if names:
                yield f"message {' '.join(names)}"


def strings(tree: Path, *folders: str) -> Iterator[str]:
    """Yield every string literal; an f-string as one, with * in place of its values."""
    for path in sources(tree, *folders):
        parsed = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(parsed) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(parsed):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield node.value


def sources(tree: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((tree / folder).rglob("*.py"))


def _path_with(tree: Path, definition: str) -> Path:
    return next(path for path in sources(tree, "service") if definition in path.read_text())


def _module_with(tree: Path, definition: str) -> Any:
    return _module(_path_with(tree, definition), tree)


def _module(path: Path, tree: Path) -> Any:
    return importlib.import_module(".".join(path.relative_to(tree).with_suffix("").parts))


if __name__ == "__main__":
    main()
