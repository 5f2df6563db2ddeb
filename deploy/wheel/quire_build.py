"""Build backend: a wheel whose only import root is `quire`, an sdist, and setuptools' editable install.

In a checkout the import roots are `service` and `model`, names that other people's environments have too. The wheel
puts both, and cuda/, into `quire`, and rewrites the imports between them.
"""

from __future__ import annotations

import ast
import gzip
import io
import os
import re
import shutil
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("service", "model")
SHIPPED = {".py", ".lua", ".json", ".jinja", ".safetensors", ".cu", ".cuh", ".html", ".css", ".js", ".svg", ".txt"}
"""Suffixes of the files in a wheel."""

PYTHON_API = Path("service", "offline", "public", "__init__.py")
"""Source of the package `quire`; an editable install maps `quire` to its folder."""

ZIP_EPOCH = "315532800"
"""1980-01-01 UTC in Unix seconds, the first time that a zip file can hold."""

LEFT_OUT = ("__pycache__", "training")
PAGES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
WHEEL_PROJECT = """
[tool.setuptools.packages.find]
include = ["quire*"]

[tool.setuptools.package-data]
"*" = ["*"]
"""

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_editable = build_meta.build_editable


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel; its times are those of SOURCE_DATE_EPOCH, else fixed, so that a build can be repeated."""
    target = os.path.abspath(wheel_directory)
    os.environ.setdefault("SOURCE_DATE_EPOCH", ZIP_EPOCH)
    with staged():
        return build_meta.build_wheel(target, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict | None = None) -> str:
    target = os.path.abspath(metadata_directory)
    with staged():
        return build_meta.prepare_metadata_for_build_wheel(target, config_settings)


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    """Pack what a wheel is built from; times are zero, so that a build can be repeated."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    name = f"quire-{version}"
    with tempfile.TemporaryDirectory() as folder, staged(()):
        info = build_meta.prepare_metadata_for_build_wheel(folder, config_settings)
        contents = {"PKG-INFO": Path(folder, info, "METADATA").read_bytes()}
    sources = [ROOT / page for page in PAGES] + list(_files(ROOT / "deploy" / "wheel"))
    sources += [path for root in (*ROOTS, "cuda") for path in _files(ROOT / root)]
    contents |= {str(path.relative_to(ROOT)): path.read_bytes() for path in sources}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path, data in sorted(contents.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    (Path(sdist_directory) / f"{name}.tar.gz").write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return f"{name}.tar.gz"


@contextmanager
def staged(roots: tuple[str, ...] = (*ROOTS, "cuda")) -> Iterator[Path]:
    """Make the tree of the wheel, and work in it: setuptools builds the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder), roots)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def stage(folder: Path, roots: tuple[str, ...]) -> None:
    package = folder / "quire"
    package.mkdir()
    for root in roots:
        for path in _files(ROOT / root):
            target = package / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".py":
                target.write_text(rewritten(path.read_text(encoding="utf-8"), str(path)), encoding="utf-8")
            else:
                shutil.copyfile(path, target)
    if roots:
        shutil.copyfile(package / PYTHON_API, package / "__init__.py")
    for page in PAGES:
        shutil.copyfile(ROOT / page, folder / page)
    readme = folder / "README.md"
    readme.write_text(description(readme.read_text(encoding="utf-8")), encoding="utf-8")
    project, _, _ = (ROOT / "pyproject.toml").read_text().partition("[tool.")
    project = project.partition("[project]")[2].replace('"service.cli.entry:run"', '"quire.service.cli.entry:run"')
    (folder / "pyproject.toml").write_text(f"[project]{project}{WHEEL_PROJECT}")


def description(readme: str) -> str:
    """Return the README for an index's page, where links into the repository lead nowhere: their text stays."""
    return re.sub(r"!?\[([^]]*)]\((?!https?:|#)[^)]*\)", lambda link: "" if link[0][0] == "!" else link[1], readme)


def rewritten(text: str, source: str) -> str:
    """Put `quire.` before the imports of `service` and `model`. Raises ValueError for a form that it cannot."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in ROOTS:
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} ", f"from quire.{node.module} ", 1)
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in ROOTS for alias in node.names):
            raise ValueError(f"{source}:{node.lineno}: only `from ... import` can be rewritten")
    return "".join(lines)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in SHIPPED and not set(path.relative_to(ROOT).parts) & set(LEFT_OUT):
            yield path
