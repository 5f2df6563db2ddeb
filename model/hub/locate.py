"""Locates the model that the user typed: a folder, a Hugging Face cache entry or a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from model.errors import ModelError
from model.hub.cache import (
    DEFAULT_REVISION,
    CachedRepository,
    cache_dir,
    check_revision,
    is_offline,
    is_repository,
)
from model.hub.files import MODEL_FILES, ServedFiles


@dataclass(frozen=True)
class LocatedModel:
    folder: Path
    name: str | None  # org/name as typed; None for a folder


def locate_model(
    typed: str,
    environ: Mapping[str, str],
    revision: str | None = None,
    download_dir: Path | None = None,
    files: ServedFiles = MODEL_FILES,
) -> LocatedModel:
    """Return the folder of `typed`; downloads `files` only if no folder or cache has them.

    `download_dir` replaces the cache folder. Raises a one-line ModelError.
    """
    folder = Path(typed)
    if _is_folder(folder):
        if revision is not None:
            raise ModelError(f"{typed}: a folder has no revision {revision}")
        return LocatedModel(folder, None)
    if not is_repository(typed):
        raise ModelError(f"{typed}: no such folder (a folder, or org/name of a Hugging Face model){_hint(typed)}")
    revision = revision or DEFAULT_REVISION
    check_revision(revision)
    cache = cache_dir(environ) if download_dir is None else download_dir
    try:
        return LocatedModel(CachedRepository.of(cache, typed).complete_snapshot(revision, files), typed)
    except OSError as error:
        raise ModelError(f"{typed}: {cache} cannot be read: {error.strerror}") from None
    except ModelError as reason:
        if is_offline(environ):
            message = f"{typed}: no such folder, and its copy in {cache} {reason} (HF_HUB_OFFLINE forbids a download)"
            raise ModelError(message) from None
    _check_endpoint(environ)
    return LocatedModel(_download(typed, revision, cache, files), typed)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _hint(typed: str) -> str:
    name, colon, _ = typed.partition(":")
    return f"; a branch, tag or commit of {name} goes to --revision" if colon and is_repository(name) else ""


def _check_endpoint(environ: Mapping[str, str]) -> None:
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ModelError(f"HF_ENDPOINT: {endpoint!r} is not a URL (https://HOST; unset: https://huggingface.co)")


def _download(name: str, revision: str, cache: Path, files: ServedFiles) -> Path:
    try:
        from model.hub.download import download_model  # 0.4 s of imports that only a download needs
    except ValueError as error:  # huggingface_hub parses its variables on import
        raise ModelError(f"{name}: an HF_ variable has a wrong value: {error}") from None
    return download_model(name, revision, cache, files)
