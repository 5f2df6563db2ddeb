"""The task-to-kernel table of cuda/README.md."""

from __future__ import annotations

import re

from tests.support.source_tree import ROOT

KERNEL_ROW = re.compile(r"^\| .+ \| `(\w+/\w+)` \| `(\w+)` \|$", re.MULTILINE)
HEADER_ROW = re.compile(r"^\| `(\w+/\w+)` \| .+ \|$", re.MULTILINE)


def kernels_of(readme: str) -> dict[str, str]:
    """folder/name of each kernel -> the method of `Ops` that launches it."""
    return dict(KERNEL_ROW.findall(readme))


def headers_of(readme: str) -> list[str]:
    """folder/name of each header."""
    return HEADER_ROW.findall(readme)


def read_readme() -> str:
    return (ROOT / "cuda" / "README.md").read_text()
