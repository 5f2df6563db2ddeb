"""Names of the tensors in a folder, read without the weights."""

from __future__ import annotations

from pathlib import Path

from model.errors import ModelError
from model.json_files import open_regular, parse_json_object, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INDEX_BYTES = 64 << 20
"""Limit for an index or header; 400 billion parameters take 0.1 MB."""


def is_base_model(directory: Path) -> bool:
    """Return whether the folder stores a model without its head, like Qwen3-Embedding-8B.

    Return False for unreadable files; `Checkpoint.open` reports what is wrong with them.
    """
    try:
        names = _stored_names(directory)
    except (ModelError, OSError):
        return False
    return "embed_tokens.weight" in names and not any(name.startswith("lm_head.") for name in names)


def _stored_names(directory: Path) -> set[str]:
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if not single.exists():
        weight_map = read_json_object(index, INDEX_BYTES).get("weight_map")
        return set(weight_map) if isinstance(weight_map, dict) else set()
    with open(open_regular(single), "rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return set(parse_json_object(file.read(num_bytes), str(single))) if num_bytes <= INDEX_BYTES else set()
