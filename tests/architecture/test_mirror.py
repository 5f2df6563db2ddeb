"""`tests/unit` mirrors `service` and `model`; modules without a unit test of their own are listed."""

from __future__ import annotations

from pathlib import Path

from tests.support.source_tree import ROOT, sources

UNIT = ROOT / "tests" / "unit"
WITHOUT_OWN_TEST = (ROOT / "tests" / "architecture" / "untested.txt").read_text().split()
"""Modules that tests of other modules, of services or of kernels cover."""


def own_test(module: str) -> Path:
    """The unit test of a module: a.b.c -> tests/unit/a/b/test_c.py."""
    package, _, name = module.rpartition(".")
    return UNIT.joinpath(*package.split("."), f"test_{name}.py")


def test_the_list_names_exactly_the_modules_without_a_unit_test():
    modules = [module.name for module in sources("service", "model") if module.text and "demo" not in module.name]
    assert sorted(module for module in modules if not own_test(module).exists()) == sorted(WITHOUT_OWN_TEST)


def test_every_unit_test_mirrors_a_package():
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
