"""Checks adapter folders before requests may use them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from model.config import ModelConfig
from service.config.lora import LoraModule
from service.config.settings import Settings
from service.errors import StartupError
from service.queue.records import AdapterRecord


def read_record(module: LoraModule, config: ModelConfig, settings: Settings) -> AdapterRecord:
    """Check an adapter's files in float32; workers check again in their own dtype. Raises ModelError."""
    from model.weights.lora.adapter import read_digest  # imports NumPy; other gateways do not need it

    path = Path(module.path).expanduser().absolute()
    digest = read_digest(path, config, settings.max_lora_rank, with_experts=settings.lora_experts)
    return AdapterRecord(name=module.name, path=str(path), digest=digest, created_s=time.time())


def read_modules(config: ModelConfig, settings: Settings) -> Mapping[str, AdapterRecord]:
    """Check --lora-modules. Raises StartupError or ModelError."""
    modules = settings.lora_modules.modules
    if not settings.enable_lora and (modules or settings.lora_dir):
        raise StartupError("--lora-modules and --lora-dir: adapters are off (--enable-lora)")
    if settings.lora_dir is not None and not settings.lora_dir.is_dir():
        raise StartupError(f"--lora-dir: {settings.lora_dir}: no such folder")
    for module in modules:
        if module.name in settings.model_names:
            raise StartupError(f"--lora-modules: {module.name} is the model's own name (another name)")
        if module.base_model_name not in (None, *settings.model_names):
            served = settings.model_names[0]
            raise StartupError(f"--lora-modules: {module.name}: base_model_name is {module.base_model_name} ({served})")
    return {module.name: read_record(module, config, settings) for module in modules}
