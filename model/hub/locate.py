"""A model's folder from what the user typed: a folder, an entry of the Hugging Face cache, or a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    name: str | None  # org/name as typed; None: a folder was typed


def locate_model(
    typed: str,
    environ: Mapping[str, str],
    revision: str | None = None,
    download_dir: Path | None = None,
    files: ServedFiles = MODEL_FILES,
) -> LocatedModel:
    """Return the folder of `typed`, whose repository has these `files`, downloading only what no folder or cache has.

    `download_dir` replaces the cache's folder. Raises ModelError with one line.
    """
    folder = Path(typed)
    if folder.is_dir():
        if revision is not None:
            raise ModelError(f"{typed}: a folder has no revision {revision}")
        return LocatedModel(folder, None)
    if not is_repository(typed):
        raise ModelError(f"{typed}: no such folder (a folder, or org/name of a Hugging Face model)")
    revision = revision or DEFAULT_REVISION
    check_revision(revision)
    cache = cache_dir(environ) if download_dir is None else download_dir
    try:
        return LocatedModel(CachedRepository.of(cache, typed).complete_snapshot(revision, files), typed)
    except ModelError as reason:
        if is_offline(environ):
            message = f"{typed}: no such folder, and its copy in {cache} {reason} (HF_HUB_OFFLINE forbids a download)"
            raise ModelError(message) from None
    return LocatedModel(_download(typed, revision, cache, files), typed)


def _download(name: str, revision: str, cache: Path, files: ServedFiles) -> Path:
    from model.hub.download import download_model  # 0.4 s of imports, which only a download needs

    return download_model(name, revision, cache, files)
