"""The images' build steps, run on a clean root of our own: there need be no container engine to know that they work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.link_lock import locked

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
BUILD_TIMEOUT_S = 560
PYTHON = shlex.quote(sys.executable)
LINKS = shlex.quote(str(ROOT / "tests" / "support" / "link_lock.py"))


@dataclass(frozen=True)
class Step:
    word: str
    text: str


def stages(name: str) -> list[list[Step]]:
    """The instructions of a Dockerfile, stage by stage."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / f"{name}.Dockerfile").read_text(), flags=re.M)
    found: list[list[Step]] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            step = Step(*line.split(maxsplit=1))
            if step.word == "FROM":
                found.append([])
            found[-1].append(step)
    return found


def build(steps: list[Step], root: Path) -> None:
    """COPY and RUN of a stage, its absolute paths under `root`. An image starts without what its lock does not name."""
    folder = root
    for step in steps:
        if step.word == "WORKDIR":
            folder = root / step.text.lstrip("/")
            folder.mkdir(parents=True)
        elif step.word == "COPY":
            *sources, target = step.text.split()
            for source in sources:
                copy(ROOT / source, folder / target)
        elif step.word == "RUN":
            command = re.sub(r"(?<![\w/])/opt/", f"{shlex.quote(str(root))}/opt/", step.text)
            command = command.replace("python -m venv", f"{PYTHON} -m venv --without-pip")  # ours installs into it
            command = re.sub(r"(\S+)/bin/pip install [^&]*-r (\S+)", rf"{PYTHON} {LINKS} \2 \1", command)
            command = re.sub(r"(\S+)/bin/pip install", rf"{PYTHON} -m pip --python \1/bin/python install", command)
            environ = {**os.environ, "PIP_COMPILE": "0"}
            subprocess.run(["/bin/sh", "-ec", command], cwd=folder, check=True, timeout=BUILD_TIMEOUT_S, env=environ)


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


@pytest.mark.timeout(600)
def test_the_gateways_image_serves_what_it_holds(tmp_path):
    first, second = stages("gateway")
    build(first, tmp_path)
    quire = tmp_path / "opt" / "quire" / "bin" / "quire"
    printed = subprocess.run(
        [quire, "check", "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert "blocks" in printed.stdout  # the demo model, the kernels' folder and every import are in the image
    assert Step("ENTRYPOINT", '["quire", "gateway"]') in second
    python = quire.with_name("python")
    assert subprocess.run([python, "-c", "import cupy"], capture_output=True, timeout=60).returncode != 0


def test_what_an_image_installs_is_installed_here_by_the_same_hashes():
    """The lock of tests is installed with `--require-hashes`, so that linking replaces another installation."""
    here = locked((ROOT / "requirements-test.txt").read_text())
    image = locked((ROOT / "requirements.txt").read_text())
    assert image
    assert image.items() <= here.items()


def test_the_workers_image_differs_in_its_lock_alone():
    gateway, worker = stages("gateway"), stages("worker")
    swapped = [Step(step.word, step.text.replace("requirements-cuda.txt", "requirements.txt")) for step in worker[0]]
    assert swapped == gateway[0]


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_no_image_runs_as_root_and_all_it_copies_may_travel(name):
    first, last = stages(name)
    assert Step("USER", "10001") in last
    allowed = {line.lstrip("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for step in first:
        if step.word == "COPY":
            assert set(step.text.split()[:-1]) <= allowed
