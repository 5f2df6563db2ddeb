"""`python link_lock.py LOCK VENV` links what a lock names from this environment into VENV, in place of installing it.

Raises AssertionError if another version is installed here.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def locked(lock: str) -> dict[str, str]:
    """Return each requirement of a lock, by name and version, with its hashes."""
    entries = (entry.partition("\n") for entry in re.split(r"\n(?=\S)", lock.strip()))
    return {re.split(r"[ ;]", head)[0]: hashes for head, _, hashes in entries}


def main(lock: Path, venv: Path) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    for old in (*site.glob("setuptools*"), site / "pkg_resources"):  # of a new environment before Python 3.12
        shutil.rmtree(old, ignore_errors=True)
    for line in re.findall(r"^[^ #].*(?= \\$)", lock.read_text(), re.M):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            link(requirement, site)


def link(requirement: Requirement, site: Path) -> None:
    found = distribution(requirement.name)
    assert found.version in requirement.specifier, f"{requirement}: {found.version} is installed here"
    for file in found.files:
        target = site / file
        if file.parts[0] != ".." and not target.exists():  # a command is not linked
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(found.locate_file(file))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
