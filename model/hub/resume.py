"""Completes partial files of a killed download by range requests, or removes them.

huggingface_hub writes each file as BLOB.RANDOM.incomplete, unique per process, deletes it after an error and never
reads another process's: only a kill leaves one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._fixes import WeakFileLock
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._runtime import is_xet_available

log = logging.getLogger("quire.hub")

SUFFIX = ".incomplete"
LOCK_WAIT_S = 0.05
LIBRARY, VERSION = "quire", version("quire")
"""The user agent."""


@dataclass(frozen=True)
class WantedBlob:
    """A large file, whose blob is named by its `sha256`."""

    path: str  # in the repository
    size: int
    sha256: str


def resume_killed(name: str, revision: str, folder: Path, wanted: list[WantedBlob]) -> None:
    """Complete the wanted blobs that a dead process left in part; remove all other parts without a live owner.

    `folder` is the repository's cache folder. Raises the client's errors; the part stays for the next start.
    """
    by_hash = {blob.sha256: blob for blob in wanted}
    for sha256, parts in _parts(folder / "blobs").items():
        with _unlocked(folder, sha256) as is_free:
            if not is_free:
                continue
            blob, target = by_hash.get(sha256), folder / "blobs" / sha256
            longest = parts.pop() if blob is not None and not target.exists() else None
            for part in parts:
                part.unlink(missing_ok=True)
            if blob is not None and longest is not None:
                _complete(name, revision, blob, longest, target)


def num_part_bytes(folder: Path) -> int:
    """Return the total size of the partial files, which `resume_killed` completes or removes."""
    return sum(part.stat().st_size for parts in _parts(folder / "blobs").values() for part in parts)


def _parts(blobs: Path) -> Mapping[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(blobs.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_size):
        found.setdefault(path.name.partition(".")[0], []).append(path)
    return found


@contextmanager
def _unlocked(folder: Path, blob: str) -> Iterator[bool]:
    """Hold the client's lock on a blob; yield False if a live process has it."""
    lock = folder.parent / ".locks" / folder.name / f"{blob}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(lock, timeout=LOCK_WAIT_S))
            is_free = True
        except TimeoutError:
            is_free = False
        yield is_free


def _complete(name: str, revision: str, blob: WantedBlob, part: Path, target: Path) -> None:
    url = hf_hub_url(name, blob.path, revision=revision)
    headers = build_hf_headers(library_name=LIBRARY, library_version=VERSION)
    metadata = get_hf_file_metadata(url, library_name=LIBRARY, library_version=VERSION)
    size = part.stat().st_size
    # Xet writes out of order: a part's size says nothing about its content.
    is_ordered = metadata.xet_file_data is None or not is_xet_available()
    if not is_ordered or not 0 < size <= blob.size:
        part.unlink()
        return
    if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)
    log.info("continuing %s at %d of %d bytes", blob.path, size, blob.size)
    with open(part, "r+b") as file:
        file.seek(size)
        http_get(metadata.location, file, resume_size=size, headers=headers, expected_size=blob.size)
    with open(part, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == blob.sha256:
        os.replace(part, target)
    else:
        part.unlink()  # the client then fetches the whole file
