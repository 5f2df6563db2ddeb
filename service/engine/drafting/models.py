"""The head or draft model that `--speculative-config` names, before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3 import Eagle3Config
from service.config.settings import Settings
from service.errors import StartupError

EAGLE3_FOLDER = "eagle3"
"""Folder of a head that comes with a model."""


@dataclass(frozen=True)
class PlannedDraftModel:
    folder: Path
    config: Eagle3Config
    num_bytes: int  # of the weights

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return [L, 2 (keys, values), Hkv, B, D]."""
        return self.config.block_shape(block_size)


def plan_draft_model(settings: Settings, target: ModelConfig) -> PlannedDraftModel | None:
    """Read the config of the settings' head; None without one. Raises StartupError."""
    wanted = settings.speculative_config
    if wanted is None or wanted.method != "eagle3" or not target.has_head:
        return None
    if wanted.model is None and (settings.model is None or settings.model_config is not None):
        raise StartupError("--speculative-config: eagle3 needs a model folder")
    folder = wanted.model or Path(settings.model or "") / EAGLE3_FOLDER
    if not folder.is_dir():
        raise StartupError(f"--speculative-config: {folder}: no such folder (a head; default: eagle3/ in the model's)")
    try:
        config = Eagle3Config.read(folder, target)
    except ModelError as error:
        raise StartupError(f"--speculative-config: {error}") from None
    return PlannedDraftModel(folder, config, config.num_bytes)
