"""Offline reader of the Hugging Face cache: models--ORG--NAME/{refs,snapshots,blobs}."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.errors import ModelError
from model.hub.files import INDEX_FILE, MODEL_FILES, ServedFiles
from model.json_files import read_json_object

DEFAULT_REVISION = "main"
UNVERIFIED = ".quire-unverified"
"""Marker of a commit whose download is incomplete or unchecked."""

INDEX_BYTES = 64 << 20
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.][\w./-]{0,254}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_TRUE = ("1", "ON", "YES", "TRUE")


def is_repository(name: str) -> bool:
    return bool(_REPOSITORY.fullmatch(name)) and "--" not in name and ".." not in name


def check_revision(revision: str) -> None:
    """Raise ModelError unless `revision` can be a branch, tag or commit."""
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelError(f"{revision!r} is not a revision (a branch, a tag or a commit)")


def is_offline(environ: Mapping[str, str]) -> bool:
    return (environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return huggingface_hub's cache folder."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(base, "huggingface")
    folder = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


@dataclass(frozen=True)
class CachedRepository:
    folder: Path

    @classmethod
    def of(cls, cache: Path, name: str) -> CachedRepository:
        return cls(cache / f"models--{name.replace('/', '--')}")

    def unverified(self, commit: str) -> Path:
        return self.folder / f"{UNVERIFIED}-{commit}"

    def snapshot(self, revision: str) -> Path | None:
        """Return the snapshot folder of a branch, tag or commit, complete or not; None if not cached.

        A commit may be abbreviated to 7 digits.
        """
        commit = revision
        if not _COMMIT.fullmatch(revision):
            try:
                commit = (self.folder / "refs" / revision).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                found = [each for each in self._commits() if each.startswith(revision)]
                commit = found[0] if _SHORT_COMMIT.fullmatch(revision) and len(found) == 1 else ""
        if not _COMMIT.fullmatch(commit):
            return None
        snapshot = self.folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    def _commits(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("snapshots/*") if _COMMIT.fullmatch(path.name))

    def complete_snapshot(self, revision: str, files: ServedFiles = MODEL_FILES) -> Path:
        """Return the snapshot folder if it has all served files. Raises ModelError naming what is missing."""
        snapshot = self.snapshot(revision)
        if snapshot is None:
            commits = self._commits()
            raise ModelError(f"has no revision {revision}, only {', '.join(commits)}" if commits else "is not there")
        if self.unverified(snapshot.name).exists():
            raise ModelError("is an interrupted download")
        available = {path.name for path in snapshot.iterdir() if path.exists()}  # a blob may be missing
        nested = {str(path.relative_to(snapshot)) for path in snapshot.glob("*/*") if path.exists()}
        files.small(available)
        files.weights(available | nested, lambda: read_json_object(snapshot / INDEX_FILE, INDEX_BYTES))
        return snapshot
