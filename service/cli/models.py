"""The model that a command line names."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from model.errors import ModelError
from model.hub.cache import is_repository
from model.hub.files import ADAPTER_FILES, MODEL_FILES, ServedFiles
from model.hub.locate import LocatedModel, locate_model
from service.config.lora import LoraModule, LoraModules
from service.config.settings import Settings
from service.errors import StartupError

DEMO_MODEL = Path(__file__).resolve().parents[2] / "model" / "demo"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")


def take_model_argument(flags: argparse.Namespace) -> None:
    """Set `flags.model` from the positional argument. Raises StartupError if the two differ."""
    word = getattr(flags, "model_argument", None)
    if word is None:
        return
    if flags.model not in (None, word):
        raise StartupError(f"--model: {flags.model} and the argument {word} differ (give one)")
    flags.model = word


def with_model(settings: Settings) -> Settings:
    """Return settings with the model's folder and name; may download. Raises StartupError."""
    if settings.model_config is not None and settings.model is None:
        return replace(settings, model=DEMO_MODEL)
    found = located(settings.model or DEMO_MODEL, settings.revision, settings.download_dir)
    if settings.enable_lora:
        settings = replace(settings, lora_modules=_with_folders(settings.lora_modules, settings.download_dir))
    name, drafts = settings.served_model_name or found.name, settings.speculative_config
    if drafts is not None and drafts.method == "draft_model":
        folder = located(drafts.model or DEMO_MODEL, None, settings.download_dir, flag="--speculative-config").folder
        settings = replace(settings, speculative_config=replace(drafts, model=folder))
    return replace(settings, model=found.folder, served_model_name=name, revision=None, download_dir=None)


def _with_folders(modules: LoraModules, download_dir: Path | None) -> LoraModules:
    def with_folder(module: LoraModule) -> LoraModule:
        if not is_repository(module.path) or Path(module.path).is_dir():
            return module
        found = located(Path(module.path), None, download_dir, flag="--lora-modules", files=ADAPTER_FILES)
        return replace(module, path=str(found.folder))

    return LoraModules(tuple(map(with_folder, modules.modules)))


def located(
    model: Path,
    revision: str | None = None,
    download_dir: Path | None = None,
    *,
    flag: str = "--model",
    files: ServedFiles = MODEL_FILES,
) -> LocatedModel:
    """Return the folder of a model or adapter, a download included. Raises StartupError that names the flag."""
    try:
        return locate_model(str(model), os.environ, revision, download_dir, files)
    except ModelError as error:
        raise StartupError(f"{flag}: {error}") from None
