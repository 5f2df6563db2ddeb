"""Downloads a model's served files into huggingface_hub's cache and checks every hash."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from model.config import ModelConfig
from model.errors import ModelError
from model.hub.cache import INDEX_BYTES, CachedRepository
from model.hub.files import CONFIG, INDEX_FILE, MODEL_FILES, ServedFiles
from model.hub.resume import LIBRARY, VERSION, WantedBlob, num_part_bytes, resume_killed
from model.json_files import read_json_object

log = logging.getLogger("quire.hub")

GIB = 1 << 30
CHUNK_BYTES = 1 << 20
HASH_THREADS = 4
CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EIO, errno.ENOTDIR, errno.EEXIST)
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def download_model(name: str, revision: str, cache: Path, files: ServedFiles = MODEL_FILES) -> Path:
    """Download the served files of `name` and return its snapshot folder. Raises a one-line ModelError.

    The config is read before the weights are fetched. A marker keeps the commit from being served until all hashes
    are checked.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    # The client writes whole chunks: a disconnect or kill loses at most one.
    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, CHUNK_BYTES)
    for library in ("huggingface_hub", "httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        _check_token()
        return _download(name, revision, cache, files)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except Exception as error:  # the client raises errors of many libraries
        raise ModelError(f"{name}: {_reason(error, name, revision, cache)}") from error


def _check_token() -> None:
    if not (get_token() or "").isascii():
        raise ModelError("HF_TOKEN: has characters outside ASCII")


def _download(name: str, revision: str, cache: Path, files: ServedFiles) -> Path:
    # Without a timeout, a firewall that drops packets would block the start for ever.
    timeout_s = constants.HF_HUB_ETAG_TIMEOUT
    info = _client().model_info(name, revision=revision, files_metadata=True, timeout=timeout_s)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    if info.sha is None:
        raise ModelError(f"{constants.ENDPOINT} names no commit of it (is HF_ENDPOINT right?)")
    repository = CachedRepository.of(cache, name)
    repository.folder.mkdir(parents=True, exist_ok=True)
    unverified = repository.unverified(info.sha)
    unverified.touch()
    small = files.small(sizes)
    snapshot = _fetch(name, revision, cache, [*small, INDEX_FILE])
    if files is MODEL_FILES and CONFIG in small:  # a draft head has no model config
        ModelConfig.read(snapshot)
    weights = files.weights(sizes, lambda: read_json_object(snapshot / INDEX_FILE, INDEX_BYTES))
    missing = sum(sizes[each] for each in weights if not (snapshot / each).exists())
    missing = max(0, missing - num_part_bytes(repository.folder))
    free = disk_usage(repository.folder).free
    if missing > free:
        raise ModelError(f"needs {missing / GIB:.2f} GiB, but {cache} has {free / GIB:.2f} GiB free")
    log.info("downloading %s, %.2f GiB, to %s", name, missing / GIB, cache)
    hashes = {each.rfilename: each.lfs.sha256 for each in info.siblings or () if each.lfs is not None}
    large = [WantedBlob(each, sizes[each], hashes[each]) for each in weights if each in hashes]
    resume_killed(name, revision, repository.folder, large)
    _fetch(name, revision, cache, weights)
    _verify(snapshot / each for each in (*small, *weights))
    unverified.unlink(missing_ok=True)
    return snapshot


def _fetch(name: str, revision: str, cache: Path, files: list[str]) -> Path:
    return Path(_client().snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=files))


def _client() -> HfApi:
    return HfApi(library_name=LIBRARY, library_version=VERSION)


def _verify(pointers: Iterable[Path]) -> None:
    """Check files against the hashes in their blobs' names. Deletes mismatches and raises ModelError."""
    paths = list(pointers)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        wrong = [path for path, is_right in zip(paths, pool.map(_matches, paths), strict=True) if not is_right]
    for path in wrong:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if wrong:
        raise ModelError(f"{wrong[0].name}: its hash is wrong; it was removed (start again to fetch it again)")


def _matches(pointer: Path) -> bool:
    """Compare content with the blob's name: sha256 for a large file, git's sha1 for a small one."""
    blob = pointer.resolve()
    if _SHA256.fullmatch(blob.name):
        return _digest(blob, hashlib.sha256()) == blob.name
    if _GIT_SHA1.fullmatch(blob.name):
        header = b"blob %d\0" % blob.stat().st_size
        return _digest(blob, hashlib.sha1(header, usedforsecurity=False)) == blob.name
    return True  # a cache without links, or a mirror with its own ETags


def _digest(path: Path, state: hashlib._Hash) -> str:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def _reason(error: BaseException, name: str, revision: str, cache: Path) -> str:
    """Describe the client's error in one line."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for each in chain:
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left in {cache}"
        if isinstance(each, OSError) and each.errno in CANNOT_WRITE:
            return f"{cache} cannot be written: {each.strerror}"
    for each in chain:
        if isinstance(each, HfHubHTTPError):
            return _http_reason(each, name, revision)
    if isinstance(error, json.JSONDecodeError | KeyError | TypeError):
        return f"{constants.ENDPOINT} does not answer as a model hub does (is HF_ENDPOINT right?)"
    detail = next(iter(str(chain[-1]).strip().splitlines()), type(chain[-1]).__name__)
    return f"the download from {constants.ENDPOINT} failed: {detail} (start again to continue)"


def _http_reason(error: HfHubHTTPError, name: str, revision: str) -> str:
    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        return f"gated: accept its terms at {page}, then set HF_TOKEN to a token of that account"
    if isinstance(error, RevisionNotFoundError):
        return f"has no revision {revision}"
    status = error.response.status_code
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return f"{constants.ENDPOINT} does not accept the token (HF_TOKEN)"
    if isinstance(error, RepositoryNotFoundError):
        return f"no such model at {constants.ENDPOINT}" + (
            ", or the token may not see it" if get_token() else "; if it is private, set HF_TOKEN"
        )
    if status == 403:
        return f"{constants.ENDPOINT} forbids it (403); HF_TOKEN needs the right to read it"
    if status == 429:
        return f"{constants.ENDPOINT} limits requests (429); wait, or set HF_TOKEN"
    return f"{constants.ENDPOINT} answers {status}" + (" (is HF_ENDPOINT right?)" if status == 404 else "")
