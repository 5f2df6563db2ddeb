"""Finds the quantisation of a folder's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model.config_fields import Fields
from model.errors import ModelError
from model.json_files import read_json_object
from model.weights.formats.awq import read_awq
from model.weights.formats.compressed_tensors import read_compressed_tensors
from model.weights.formats.fp8 import read_fp8
from model.weights.formats.gptq import read_gptq
from model.weights.formats.modelopt import read_modelopt
from model.weights.formats.nf4 import read_bitsandbytes
from model.weights.formats.quantisation import Quantisation

CONFIG_BYTES = 16 << 20

METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "gptq": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
}
"""Readers by `quant_method`."""

OLDER_FILES: dict[str, Callable[[Fields], Quantisation]] = {
    "quantize_config.json": read_gptq,
    "quant_config.json": read_awq,
}
"""Config files of older checkpoints."""

MODELOPT_FILE = "hf_quant_config.json"


def read_quantisation(directory: Path) -> Quantisation | None:
    """Read config.json or an older file; None for 16- or 32-bit weights. Raises ModelError."""
    path = directory / "config.json"
    if not path.exists():
        return None
    config = Fields(read_json_object(path, CONFIG_BYTES), str(path))
    for name in ("quantization_config", "compression_config"):
        if (section := config.section(name)) is not None:
            return _read(section)
    if (directory / MODELOPT_FILE).exists():
        path = directory / MODELOPT_FILE
        section = Fields(read_json_object(path, CONFIG_BYTES), str(path)).section("quantization")
        if section is None:
            raise ModelError(f"{path}: quantization: missing")
        return read_modelopt(section)
    for file_name, read in OLDER_FILES.items():
        if (path := directory / file_name).exists():
            return read(Fields(read_json_object(path, CONFIG_BYTES), str(path)))
    return None


def _read(section: Fields) -> Quantisation:
    method = section.text("quant_method", "compressed-tensors" if section.get("config_groups") else None)
    if method not in METHODS:
        raise section.error("quant_method", f"{method!r} is not supported ({', '.join(METHODS)})")
    return METHODS[method](section)
