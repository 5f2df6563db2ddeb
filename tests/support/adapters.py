"""LoRA adapters of random values in PEFT's format, and models with them merged: W + scale * B @ A."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from model.config import ModelConfig
from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.weights.checkpoint import expected_shapes
from model.weights.loader import load_model
from model.weights.lora.adapter import read_adapter
from model.weights.safetensors_file import FLOAT_DTYPES, read_safetensors
from service.engine.request import AdapterSource
from tests.support.safetensors_bytes import save

MAX_RANK = 512
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Written(Protocol):
    """An adapter on disk."""

    @property
    def folder(self) -> Path: ...

    @property
    def deltas(self) -> Mapping[str, np.ndarray]:
        """Return the changes of each module's weight."""


@dataclass(frozen=True)
class WrittenAdapter:
    folder: Path
    tensors: dict[str, np.ndarray]
    scales: Mapping[str, float]  # by module

    @property
    def deltas(self) -> Mapping[str, np.ndarray]:
        return {module: self.delta(module) for module in self.scales}

    def delta(self, module: str) -> np.ndarray:
        name = f"base_model.model.{module}"
        a, b = self.tensors[f"{name}.lora_A.weight"], self.tensors[f"{name}.lora_B.weight"]
        return np.float32(self.scales[module]) * (b.astype(np.float32) @ a.astype(np.float32))


def write_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    rank: int = 8,
    targets: Iterable[str] = ALL,
    alpha: float = 16,
    seed: int = 0,
    strength: float = 1.0,
    dtype: np.dtype = FLOAT_DTYPES["F32"],
    layers: Iterable[int] | None = None,
    **fields,
) -> WrittenAdapter:
    """Write an adapter; `fields` join adapter_config.json. Its changes are about `strength` times a weight."""
    rng, targets = np.random.default_rng(seed), tuple(targets)
    shapes, tensors, scales = expected_shapes(config), {}, {}
    rank_of = fields.get("rank_pattern", {})
    alpha_of = fields.get("alpha_pattern", {})
    for layer in range(config.num_layers) if layers is None else layers:
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            if not module.startswith(f"model.layers.{layer}.") or last not in targets:
                continue
            own_rank = rank_of.get(last, rank)
            root = math.sqrt(own_rank) if fields.get("use_rslora") else own_rank
            scales[module] = alpha_of.get(last, alpha) / root
            a = rng.standard_normal((own_rank, shape[1]), np.float32) / np.float32(math.sqrt(shape[1]))
            b = rng.standard_normal((shape[0], own_rank), np.float32) / np.float32(scales[module] * math.sqrt(own_rank))
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(dtype)
            tensors[f"base_model.model.{module}.lora_B.weight"] = (b * np.float32(0.2 * strength)).astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "adapter_model.safetensors", tensors)
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    written |= {"target_modules": sorted(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return WrittenAdapter(folder, tensors, scales)


def source_of(adapter: WrittenAdapter, config: ModelConfig, dtype: np.dtype, name: str = "") -> AdapterSource:
    """Return what a job of this adapter carries."""
    read = read_adapter(adapter.folder, config, dtype, MAX_RANK)
    return AdapterSource(name=name or adapter.folder.name, path=str(adapter.folder), digest=read.digest)


def merged_model(model_folder: Path, adapter: Written, to: Path, max_len: int) -> Llama:
    """Return the model of `model_folder` with the adapter added to its weights, written to `to` in between."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.copy(model_folder / "config.json", to)
    stored = read_safetensors(model_folder / "model.safetensors")
    tensors = {name: tensor.values().astype(np.float32) for name, tensor in stored.items()}
    for module, delta in adapter.deltas.items():
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + delta
    save(to / "model.safetensors", tensors)
    return load_model(to, ModelConfig.read(to), NumpyOps(), max_len)
