"""Python sources as syntax trees, for the tests of the tree's rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One name that a module imports: `from a.b import c` is the target `a.b.c`."""

    target: str
    line: int
    inside_function: bool


@dataclass(frozen=True)
class Source:
    """One module: its dotted name, its text and its tree."""

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str, text: str) -> Source:
        return cls(name, text, ast.parse(text))

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def imports(self) -> list[Import]:
        """Every import of the module, relative ones resolved."""
        return self._imports

    @cached_property
    def _imports(self) -> list[Import]:
        imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        deferred = {
            id(inner)
            for outer in self.functions()
            for inner in ast.walk(outer)
            if isinstance(inner, ast.Import | ast.ImportFrom)
        }
        return [Import(target, node.lineno, id(node) in deferred) for node in imports for target in self._targets(node)]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def _targets(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        base = [node.module] if node.module else []
        if node.level:
            base = [*self.name.split(".")[: -node.level], *base]
        return [".".join([*base, alias.name]) for alias in node.names]


def sources(*folders: str) -> list[Source]:
    """Return all modules below these folders, by name."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(_source(name, path))
    return found


@cache
def _source(name: str, path: Path) -> Source:
    return Source.of(name, path.read_text())


def is_within(name: str, room: str) -> bool:
    """Return whether a dotted name is a module or package, or is inside it."""
    return name == room or name.startswith(room + ".")


def module_graph(modules: list[Source], deferred: bool = True) -> dict[str, set[str]]:
    """Return each module's imports among these; without `deferred` only those run by importing it."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        targets = {imported.target for imported in module.imports() if deferred or not imported.inside_function}
        graph[module.name] = {_module_of(target, names) for target in targets} - {None, module.name}
    return graph


def _module_of(target: str, names: set[str]) -> str | None:
    return next((name for name in (target, target.rpartition(".")[0]) if name in names), None)
