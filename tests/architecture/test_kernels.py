"""One file, one op, one twin, one test for each kernel; and nothing but CUDA in `cuda/`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, Source, sources

CUDA = ROOT / "cuda"
MAX_FILE_LINES = 400
HELPER_ROW = re.compile(r"^\|\s*`?(\w+)`?\s*\|.*\bhelper of `(\w+)`", re.MULTILINE)


def foreign_files(names: Iterable[str]) -> list[str]:
    """Names in `cuda/` that are no CUDA source. A `.py` there would shadow NVIDIA's namespace package `cuda`."""
    return [name for name in names if name != "README.md" and Path(name).suffix not in (".cu", ".cuh")]


def methods_of(modules: list[Source], name: str, class_name: str) -> set[str]:
    """The public methods of one class."""
    tree = next(module.tree for module in modules if module.name == name)
    body = next(node.body for node in tree.body if getattr(node, "name", None) == class_name)
    return {node.name for node in body if not getattr(node, "name", "_").startswith("_")}


def homeless_kernels(kernels: Iterable[str], readme: str, ops: set[str], twins: set[str], tests: set[str]) -> list[str]:
    """Kernels without an op, a twin or a test. A helper, named so in cuda/README.md, has the op and twin it helps."""
    helped = dict(HELPER_ROW.findall(readme))
    found = []
    for kernel in kernels:
        op = helped.get(kernel, kernel)
        if op not in ops:
            found.append(f"{kernel}: no op of that name in model/ops/interface.py, and no helper in cuda/README.md")
        if op not in twins:
            found.append(f"{kernel}: no twin {op} in model/ops/numpy_ops.py")
        if kernel not in tests:
            found.append(f"{kernel}: no tests/kernel/test_{kernel}.py")
    return found


def unlisted_sources(names: Iterable[str], readme: str) -> list[str]:
    """Sources that have no row in cuda/README.md."""
    return [name for name in names if f"| `{name.removesuffix('.cu')}` |" not in readme]


def test_the_readme_lists_every_source():
    names = sorted(path.name for path in CUDA.glob("*.cu*"))
    assert unlisted_sources(names, (CUDA / "README.md").read_text()) == []


def test_cuda_holds_cuda_only():
    assert foreign_files(path.relative_to(CUDA).as_posix() for path in CUDA.rglob("*") if path.is_file()) == []


def test_every_kernel_has_an_op_a_twin_and_a_test():
    modules = sources("model/ops")
    found = homeless_kernels(
        sorted(path.stem for path in CUDA.glob("*.cu")),
        (CUDA / "README.md").read_text(),
        methods_of(modules, "model.ops.interface", "Ops"),
        methods_of(modules, "model.ops.numpy_ops", "NumpyOps"),
        {path.stem.removeprefix("test_") for path in (ROOT / "tests/kernel").glob("test_*.py")},
    )
    assert found == []


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.cu*")), ids=lambda path: path.name)
def test_a_source_says_what_it_is_and_is_no_longer_than_a_room(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert len(lines) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.cu")), ids=lambda path: path.name)
def test_a_kernel_names_its_twin_its_grid_and_its_roofline(path):
    text = path.read_text().lower()
    assert [word for word in ("twin", "grid", "roofline") if word not in text] == []


def test_the_rules_can_fail():
    assert foreign_files(["rms_norm.cu", "types.cuh", "README.md", "__init__.py", "old/x.cubin"]) == [
        "__init__.py",
        "old/x.cubin",
    ]
    ops = {"linear", "rms_norm"}
    readme = "| kernel | does |\n| `add_bias` | y += b; helper of `linear` |\n"
    tests = {"add_bias", "rms_norm"}
    assert homeless_kernels(["add_bias", "rms_norm"], readme, ops, ops, tests) == []
    assert len(homeless_kernels(["add_bias"], "", ops, ops, tests)) == 2
    assert len(homeless_kernels(["rms_norm"], readme, ops, set(), ops)) == 1
    assert len(homeless_kernels(["rms_norm"], readme, ops, ops, {"linear"})) == 1
    assert unlisted_sources(["add_bias.cu", "types.cuh"], readme) == ["types.cuh"]
