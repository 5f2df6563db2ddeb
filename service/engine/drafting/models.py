"""Plan of the draft head or model named by `--speculative-config`, before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3_config import Eagle3Config
from model.families.eagle3_device import FLOAT32, check_on_device
from model.kv_cache import block_shape
from model.ops.interface import Ops
from model.text.tokenizer import Tokenizer
from model.weights.loader import plan_weights
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.errors import StartupError

LONGEST_STEP = 8192
"""Tokens of a GPU step without --max-num-batched-tokens."""
EAGLE3_FOLDER = "eagle3"
"""Folder of a draft head that comes with a model."""


@dataclass(frozen=True)
class PlannedDraftModel:
    folder: Path
    config: Eagle3Config | ModelConfig
    num_bytes: int  # of the weights; on a GPU also of the states of the longest step

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return [L, 2 (keys, values), Hkv, B, D]."""
        if isinstance(self.config, Eagle3Config):
            return self.config.block_shape(block_size)
        return block_shape(self.config, block_size)

    @property
    def num_proposed(self) -> int | None:
        """Number of draft tokens its authors propose."""
        return self.config.num_speculative_tokens if isinstance(self.config, Eagle3Config) else None


def plan_draft_model(settings: Settings, target: ModelConfig, ops: Ops) -> PlannedDraftModel | None:
    """Read the config of the settings' draft head or model; None without one. Raises StartupError."""
    wanted = settings.speculative_config
    if wanted is None or not target.has_head:
        return None
    if wanted.method == "eagle3":
        return _eagle3(settings, wanted, target, ops)
    if wanted.method == "draft_model" and wanted.model is not None:
        return _draft_model(settings, wanted.model, ops)
    return None


def _draft_model(settings: Settings, folder: Path, ops: Ops) -> PlannedDraftModel:
    if settings.model is None or settings.model_config is not None:
        raise StartupError("--speculative-config: draft_model needs a model folder, whose vocabulary is compared")
    try:
        config = ModelConfig.read(folder)
        num_bytes = plan_weights(folder, config, ops.dtype).num_bytes
        ours, theirs = (_vocabulary(each) for each in (Path(settings.model), folder))
    except ModelError as error:
        raise StartupError(f"--speculative-config: {error}") from None
    if not config.has_head:
        raise StartupError(f"--speculative-config: {folder}: the model generates nothing")
    differing = sum(a != b for a, b in zip_longest(ours, theirs))
    if differing:
        raise StartupError(
            f"--speculative-config: {folder}: {differing} of {len(ours)} tokens differ from the model's (a draft model "
            "has the same vocabulary)"
        )
    return PlannedDraftModel(folder, config, num_bytes)


def _vocabulary(folder: Path) -> list[bytes]:
    tokenizer = Tokenizer.read(folder)
    return [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]


def _eagle3(settings: Settings, wanted: SpeculativeConfig, target: ModelConfig, ops: Ops) -> PlannedDraftModel:
    if wanted.model is None and (settings.model is None or settings.model_config is not None):
        raise StartupError("--speculative-config: eagle3 needs a model folder")
    folder = wanted.model or Path(settings.model or "") / EAGLE3_FOLDER
    if not folder.is_dir():
        raise StartupError(f"--speculative-config: {folder}: no such folder (a head; default: eagle3/ in the model's)")
    try:
        config = Eagle3Config.read(folder, target)
        if ops.name == "cuda":
            check_on_device(config, target)
    except ModelError as error:
        raise StartupError(f"--speculative-config: {error}") from None
    if ops.name != "cuda":
        return PlannedDraftModel(folder, config, FLOAT32.itemsize * config.num_weights)
    row_bytes = len(config.state_layers) * config.hidden_size * ops.dtype.itemsize
    states_bytes = (settings.max_num_batched_tokens or LONGEST_STEP) * row_bytes
    return PlannedDraftModel(folder, config, ops.dtype.itemsize * config.num_weights + states_bytes)
