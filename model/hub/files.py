"""Selects served files: weights without code, configs, tokenizer, chat template; adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from model.errors import ModelError
from model.gguf_file import are_parts

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_FILES = (
    CONFIG, TOKENIZER, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
)  # fmt: skip
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

ReadIndex = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class ServedFiles:
    """File selectors for one kind of repository. Both raise ModelError naming what is missing."""

    small: Callable[[Collection[str]], list[str]]
    weights: Callable[[Collection[str], ReadIndex], list[str]]


def small_files(available: Collection[str]) -> list[str]:
    """Return the served files except weights. Raises ModelError without a tokenizer, or a config or GGUF."""
    if TOKENIZER not in available:
        raise ModelError(f"has no {TOKENIZER}")
    if CONFIG not in available and not any(name.endswith(".gguf") for name in available):
        raise ModelError(f"has no {CONFIG}")
    return [name for name in SMALL_FILES if name in available]


def draft_files(available: Collection[str]) -> list[str]:
    """Return `small_files` of a draft model or head; a head has no tokenizer. Raises ModelError without a config."""
    if CONFIG not in available:
        raise ModelError(f"has no {CONFIG}")
    return [name for name in SMALL_FILES if name in available]


def weight_files(available: Collection[str], read_index: ReadIndex) -> list[str]:
    """Return the files that `Checkpoint` would read. Raises ModelError if any are missing."""
    if SINGLE_FILE in available:
        return [SINGLE_FILE]
    if INDEX_FILE in available:
        return [INDEX_FILE, *_shards(available, read_index())]
    ggufs = sorted(name for name in available if name.endswith(".gguf") and "/" not in name)
    if len(ggufs) > 1 and not are_parts(ggufs):
        raise ModelError(f"has {len(ggufs)} .gguf files: download the one to serve, and give its folder")
    if not ggufs:
        pickled = any(name.endswith(PICKLES) for name in available)
        raise ModelError(f"has no {SINGLE_FILE}" + (" (pickled weights are never loaded)" if pickled else ""))
    return ggufs


def adapter_files(available: Collection[str]) -> list[str]:
    """Return a LoRA adapter's config file. Raises ModelError without one."""
    if ADAPTER_CONFIG not in available:
        raise ModelError(f"has no {ADAPTER_CONFIG}")
    return [ADAPTER_CONFIG]


def adapter_weights(available: Collection[str], _: ReadIndex) -> list[str]:
    """Return a LoRA adapter's weight file. Raises ModelError without one."""
    if ADAPTER_FILE not in available:
        pickled = any(name.endswith(PICKLES) for name in available)
        raise ModelError(f"has no {ADAPTER_FILE}" + (" (pickled weights are never loaded)" if pickled else ""))
    return [ADAPTER_FILE]


MODEL_FILES = ServedFiles(small_files, weight_files)
DRAFT_FILES = ServedFiles(draft_files, weight_files)
ADAPTER_FILES = ServedFiles(adapter_files, adapter_weights)


def _shards(available: Collection[str], index: dict[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{INDEX_FILE}: no weight_map")
    missing = sorted(names - set(available))
    if missing:
        raise ModelError(f"has no {missing[0]}, which {INDEX_FILE} names")
    return sorted(names)
