"""Locates the model named on the command line."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from model.errors import ModelError
from model.families.eagle3_config import MAX_CONFIG_BYTES, is_eagle3
from model.hub.cache import is_repository
from model.hub.files import ADAPTER_FILES, CONFIG, DRAFT_FILES, MODEL_FILES, ServedFiles
from model.hub.locate import LocatedModel, locate_model
from model.json_files import read_json_object
from service.config.lora import LoraModule, LoraModules
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.errors import StartupError

DEMO_MODEL = Path(__file__).resolve().parents[2] / "model" / "demo"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")


def take_model_argument(flags: argparse.Namespace) -> None:
    """Set `flags.model` from the positional argument. Raises StartupError if the two differ or it is a flag."""
    word = getattr(flags, "model_argument", None)
    if word is None:
        return
    if word.startswith("--"):  # argparse takes an unknown flag with a space in its value for an argument
        raise StartupError(f"{word.partition('=')[0]}: unknown argument")
    if flags.model not in (None, word):
        raise StartupError(f"--model: {flags.model} and the argument {word} differ (give one)")
    flags.model = word


def with_model(settings: Settings) -> Settings:
    """Return settings with the model's folder and name, downloading if needed. Raises StartupError."""
    if settings.model_config is not None and settings.model is None:
        return replace(settings, model=DEMO_MODEL)
    found = located(settings.model or DEMO_MODEL, settings.revision, settings.download_dir)
    if settings.enable_lora:
        modules = _with_folders(settings.lora_modules, settings.download_dir)
        settings = replace(
            settings, lora_modules=modules, lora_experts=settings.lora_experts or _adapts_experts(modules)
        )
    name, drafts = settings.served_model_name or found.name, settings.speculative_config
    if drafts is not None and drafts.model is not None:
        settings = replace(settings, speculative_config=_with_draft_folder(drafts, settings.download_dir))
    return replace(settings, model=found.folder, served_model_name=name, revision=None, download_dir=None)


def _with_draft_folder(drafts: SpeculativeConfig, download_dir: Path | None) -> SpeculativeConfig:
    """Return settings with the folder of the head or draft model and the method its config implies."""
    flag = "--speculative-config"
    folder = located(drafts.model or DEMO_MODEL, drafts.revision, download_dir, flag=flag, files=DRAFT_FILES).folder
    method = drafts.method
    try:
        has_config = (folder / CONFIG).is_file()
        if method == "draft_model" and has_config and is_eagle3(read_json_object(folder / CONFIG, MAX_CONFIG_BYTES)):
            method = "eagle3"
    except ModelError as error:
        raise StartupError(f"{flag}: {error}") from None
    if method == "draft_model" and drafts.num_speculative_tokens is None:
        raise StartupError(f"{flag}: draft_model needs num_speculative_tokens")
    return replace(drafts, method=method, model=folder, revision=None)


def _with_folders(modules: LoraModules, download_dir: Path | None) -> LoraModules:
    def with_folder(module: LoraModule) -> LoraModule:
        if not is_repository(module.path) or Path(module.path).is_dir():
            return module
        found = located(Path(module.path), None, download_dir, flag="--lora-modules", files=ADAPTER_FILES)
        return replace(module, path=str(found.folder))

    return LoraModules(tuple(map(with_folder, modules.modules)))


def _adapts_experts(modules: LoraModules) -> bool:
    """Return whether an adapter has expert or router tensors. Unreadable adapters are refused when they are read."""
    if not modules.modules:
        return False
    from model.weights.lora.adapter import adapts_experts  # imports NumPy; other gateways do not need it

    def has_experts(module: LoraModule) -> bool:
        try:
            return adapts_experts(Path(module.path).expanduser())
        except ModelError:
            return False

    return any(map(has_experts, modules.modules))


def located(
    model: Path,
    revision: str | None = None,
    download_dir: Path | None = None,
    *,
    flag: str = "--model",
    files: ServedFiles = MODEL_FILES,
) -> LocatedModel:
    """Return the folder of a model or adapter, downloading if needed. Raises StartupError that names the flag."""
    try:
        return locate_model(str(model), os.environ, revision, download_dir, files)
    except ModelError as error:
        raise StartupError(f"{flag}: {error}") from None
