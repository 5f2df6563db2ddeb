"""Python sources as syntax trees, for the tests that hold the house to its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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

    def imports(self) -> Iterator[Import]:
        """Every import of the module, wherever it stands, relative ones resolved."""
        deferred = {id(inner) for outer in self.functions() for inner in ast.walk(outer)}
        for node in ast.walk(self.tree):
            for target in self._targets(node):
                yield Import(target, node.lineno, id(node) in deferred)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

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
    """All modules below these folders of the repository, by name."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Source.of(name, path.read_text()))
    return found


def is_within(name: str, room: str) -> bool:
    """Whether a dotted name is a module or package, or stands inside it."""
    return name == room or name.startswith(room + ".")


def module_graph(modules: list[Source], deferred: bool = True) -> dict[str, set[str]]:
    """Which of these modules each of them imports; without `deferred` only what an import of the module itself runs."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        targets = {imported.target for imported in module.imports() if deferred or not imported.inside_function}
        graph[module.name] = {_module_of(target, names) for target in targets} - {None, module.name}
    return graph


def _module_of(target: str, names: set[str]) -> str | None:
    return next((name for name in (target, target.rpartition(".")[0]) if name in names), None)
