"""Quantisation method named by a folder's config; array-free, so that startup can check it at once."""

from __future__ import annotations

from pathlib import Path

from model.config_fields import Fields
from model.errors import ModelError
from model.json_files import read_json_object

CONFIG_BYTES = 16 << 20
OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Methods by config file of older checkpoints."""

MODELOPT_FILE = "hf_quant_config.json"
CONFIG_FIELDS = ("quantization_config", "compression_config")
DECIDING_FIELDS = ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "zero_point", "version", "quant_algo")


def find_method(directory: Path) -> tuple[str, Fields] | None:
    """Return (method, its section) from config.json or an older file; None for 16- or 32-bit weights.

    Raises ModelError, also if two of them contradict each other.
    """
    path = directory / "config.json"
    if not path.exists():
        return None
    config = Fields(read_json_object(path, CONFIG_BYTES), str(path))
    named = [section for name in CONFIG_FIELDS if (section := config.section(name)) is not None]
    found = [
        (section.text("quant_method", "compressed-tensors" if section.get("config_groups") else None), section)
        for section in named
    ]
    found += _older(directory)
    for method, section in found[1:]:
        _check_agree(found[0], method, section)
    return found[0] if found else None


def _older(directory: Path) -> list[tuple[str, Fields]]:
    found = []
    if (path := directory / MODELOPT_FILE).exists():
        section = Fields(read_json_object(path, CONFIG_BYTES), str(path)).section("quantization")
        if section is None:
            raise ModelError(f"{path}: quantization: missing")
        found.append(("modelopt", section))
    for file_name, method in OLDER_FILES.items():
        if (path := directory / file_name).exists():
            section = Fields(read_json_object(path, CONFIG_BYTES), str(path))
            found.append((section.text("quant_method", method), section))
    return found


def _check_agree(first: tuple[str | None, Fields], method: str | None, section: Fields) -> None:
    """Raise ModelError if a field that decides how tensors are read differs from the first section's."""
    known, used = first
    if (known or "").removesuffix("_fp4") != (method or "").removesuffix("_fp4"):
        raise section.error("quant_method", f"{method!r} contradicts {used.source} ({known!r})")
    for name in DECIDING_FIELDS:
        own, other = section.get(name), used.get(name)
        if None not in (own, other) and str(own).lower() != str(other).lower():  # AutoAWQ: "GEMM" and "gemm"
            raise section.error(name, f"{own!r} contradicts {used.source} ({other!r})")
