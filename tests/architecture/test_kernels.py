"""One file, one method of `Ops`, one reference, one test for each kernel; and nothing but CUDA in `cuda/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pytest

from tests.support.kernel_table import headers_of, kernels_of, read_readme
from tests.support.source_tree import ROOT, Source, sources

CUDA = ROOT / "cuda"
MAX_FILE_LINES = 700
METHODS_OF = (
    ("model.ops.interface", "Device"),
    ("model.ops.interface", "Ops"),
    ("model.ops.interface", "DraftOps"),
    ("model.ops.adapter_interface", "AdapterOps"),
)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def foreign_files(names: Iterable[str]) -> list[str]:
    """Names in `cuda/` that are no CUDA source in a folder. A `.py` there would shadow NVIDIA's package `cuda`."""
    return [name for name in names if name != "README.md" and not re.fullmatch(r"\w+/\w+\.cuh?", name)]


def methods_of(modules: list[Source], name: str, class_name: str) -> set[str]:
    """The public methods of one class."""
    tree = next(module.tree for module in modules if module.name == name)
    body = next(node.body for node in tree.body if getattr(node, "name", None) == class_name)
    return {node.name for node in body if not getattr(node, "name", "_").startswith("_")}


def incomplete_kernels(table: Mapping[str, str], ops: set[str], references: set[str], tests: set[str]) -> list[str]:
    """Kernels without a method of `Ops`, a reference or a test, and names that two folders have."""
    found, folders = [], {}
    for path, op in table.items():
        folder, _, kernel = path.partition("/")
        if folders.setdefault(kernel, folder) != folder:
            found.append(f"{kernel}: in both {folders[kernel]}/ and {folder}/")
        if op not in ops:
            found.append(f"{kernel}: no op {op} in model/ops/interface.py or adapter_interface.py")
        if op not in references:
            found.append(f"{kernel}: no reference {op} in model/ops/cpu/ops.py")
        if kernel not in tests:
            found.append(f"{kernel}: no test_{kernel}.py in tests/kernel")
    return found


def missing_includes(text: str, headers: set[str]) -> list[str]:
    """Includes that name no header by its path below `cuda/`."""
    return [name for name in INCLUDE.findall(text) if name not in headers]


def stems(suffix: str) -> list[str]:
    """folder/name of every file with this suffix."""
    return sorted(path.relative_to(CUDA).with_suffix("").as_posix() for path in CUDA.rglob(f"*{suffix}"))


def test_the_readme_lists_every_source_and_no_other():
    assert sorted(kernels_of(read_readme())) == stems(".cu")
    assert sorted(headers_of(read_readme())) == stems(".cuh")


def test_cuda_holds_cuda_only():
    assert foreign_files(path.relative_to(CUDA).as_posix() for path in CUDA.rglob("*") if path.is_file()) == []


def test_every_kernel_has_an_op_a_reference_and_a_test():
    modules = sources("model/ops")
    found = incomplete_kernels(
        kernels_of(read_readme()),
        set().union(*(methods_of(modules, *place) for place in METHODS_OF)),
        methods_of(modules, "model.ops.cpu.device", "NumpyDevice")
        | methods_of(modules, "model.ops.cpu.ops", "NumpyOps"),
        {path.stem.removeprefix("test_") for path in (ROOT / "tests/kernel").rglob("test_*.py")},
    )
    assert found == []


@pytest.mark.parametrize("path", sorted(CUDA.rglob("*.cu*")), ids=lambda path: path.name)
def test_a_source_describes_itself_and_has_at_most_700_lines(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert len(lines) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", sorted(CUDA.rglob("*.cu*")), ids=lambda path: path.name)
def test_a_source_includes_headers_by_their_path(path):
    assert missing_includes(path.read_text(), {f"{stem}.cuh" for stem in stems(".cuh")}) == []


@pytest.mark.parametrize("path", sorted(CUDA.rglob("*.cu")), ids=lambda path: path.name)
def test_a_kernel_names_its_reference_its_grid_and_its_roofline(path):
    text = path.read_text()
    assert [word for word in ("reference", "grid", "roofline") if word not in text.lower()] == []
    assert re.search(rf"\b{path.stem}\(", text), "the extern function has the file's name"


def test_the_rules_can_fail():
    names = ["layer/rms_norm.cu", "common/types.cuh", "README.md", "__init__.py", "old/x.cubin", "types.cuh"]
    assert foreign_files(names) == ["__init__.py", "old/x.cubin", "types.cuh"]
    readme = "| task | kernel | `Ops` method |\n| add | `linear/add_bias` | `linear` |\n\n| `common/types` | types |\n"
    table = kernels_of(readme)
    assert table == {"linear/add_bias": "linear"}
    assert headers_of(readme) == ["common/types"]
    ops, tests = {"linear", "rms_norm"}, {"add_bias", "rms_norm"}
    assert incomplete_kernels(table, ops, ops, tests) == []
    assert len(incomplete_kernels({"linear/add_bias": "add"}, ops, ops, tests)) == 2
    assert len(incomplete_kernels(table, ops, set(), tests)) == 1
    assert len(incomplete_kernels(table, ops, ops, {"linear"})) == 1
    assert len(incomplete_kernels({"a/rms_norm": "linear", "b/rms_norm": "linear"}, ops, ops, tests)) == 1
    assert missing_includes('#include "types.cuh"\n#include "common/mma.cuh"', {"common/mma.cuh"}) == ["types.cuh"]
