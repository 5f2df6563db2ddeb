"""The quantisation method that a folder's config names; without arrays, so that a start can check it at once."""

from __future__ import annotations

from pathlib import Path

from model.config_fields import Fields
from model.errors import ModelError
from model.json_files import read_json_object

CONFIG_BYTES = 16 << 20
OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Methods by the config files of older checkpoints."""

MODELOPT_FILE = "hf_quant_config.json"


def find_method(directory: Path) -> tuple[str, Fields] | None:
    """Return (method, its section) from config.json or an older file; None for 16- or 32-bit weights.

    Raises ModelError.
    """
    path = directory / "config.json"
    if not path.exists():
        return None
    config = Fields(read_json_object(path, CONFIG_BYTES), str(path))
    for name in ("quantization_config", "compression_config"):
        if (section := config.section(name)) is not None:
            return section.text("quant_method", "compressed-tensors" if section.get("config_groups") else None), section
    if (directory / MODELOPT_FILE).exists():
        path = directory / MODELOPT_FILE
        section = Fields(read_json_object(path, CONFIG_BYTES), str(path)).section("quantization")
        if section is None:
            raise ModelError(f"{path}: quantization: missing")
        return "modelopt", section
    for file_name, method in OLDER_FILES.items():
        if (path := directory / file_name).exists():
            return method, Fields(read_json_object(path, CONFIG_BYTES), str(path))
    return None
