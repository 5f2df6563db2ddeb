"""Scales of an fp8 KV cache in a checkpoint, under the names its writers use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.formats.method import find_method
from model.weights.formats.stored_matrix import FLOAT32, FLOATS, SCALAR_SHAPES, check_scales
from model.weights.safetensors_file import DTYPE_WORDS, StoredTensor

_SPELLINGS = re.compile(
    r"layers\.(?P<layer>\d{1,6})\.self_attn\."
    r"(?:(?:attn\.)?(?P<scale>kv|k|v)_scale"
    r"|qkv_proj\.(?P<fused>[kv])_scale"
    r"|(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale))$"
)
"""vLLM and compressed-tensors; ModelOpt (k_proj.k_scale); older: k_proj.output_scale and kv_scale (both sides)."""

SIDES = ("k_scale", "v_scale")


def is_kv_scale(name: str) -> bool:
    return _SPELLINGS.search(name) is not None


def read_kv_scales(tensors: Mapping[str, StoredTensor], config: ModelConfig, where: Path) -> np.ndarray | None:
    """Return float32[L, 2, Hkv] of each layer's keys and values; None without `tensors`.

    A stored scale is one number, [Hkv] or [Hkv, 1, 1]. Raises ModelError for a malformed, repeated or partly missing
    scale, or a type other than fp8 in the config.
    """
    _check_scheme(where)
    if not tensors:
        return None
    scales = np.zeros((config.num_layers, 2, config.num_kv_heads), FLOAT32)
    for name, tensor in sorted(tensors.items()):
        layer, sides = _place(name)
        if layer >= config.num_layers:
            raise tensor.error(f"is no part of this model ({config.num_layers} layers)")
        if scales[layer, sides].any():
            raise tensor.error("is a second scale of one side of the KV cache")
        scales[layer, sides] = _values(tensor, config.num_kv_heads)
    for layer, side in np.argwhere(scales[:, :, 0] == 0).tolist():
        raise ModelError(f"{where}: layer {layer} has no {SIDES[side]}, but other layers have KV scales")
    return scales


def _place(name: str) -> tuple[int, list[int]]:
    match = _SPELLINGS.search(name)
    if match is None:
        raise AssertionError(f"{name} is no KV scale")
    letters = match["scale"] or match["fused"] or match["projection"]
    return int(match["layer"]), ["kv".index(letter) for letter in letters]


def _values(tensor: StoredTensor, num_kv_heads: int) -> np.ndarray:
    shapes = (*SCALAR_SHAPES, (num_kv_heads,), (num_kv_heads, 1, 1))
    if tensor.dtype not in FLOATS:
        raise tensor.error(f"dtype is {DTYPE_WORDS[tensor.dtype]} ({', '.join(DTYPE_WORDS[each] for each in FLOATS)})")
    if tensor.shape not in shapes:
        raise tensor.error(
            f"shape is {list(tensor.shape)} (allowed: one number, or one for each of {num_kv_heads} heads)"
        )
    values = tensor.values().reshape(-1).astype(FLOAT32)
    check_scales(tensor, values)
    return values


def _check_scheme(where: Path) -> None:
    """Raise ModelError if the config gives the scales a type other than fp8."""
    found = find_method(where)
    if found is None:
        return
    section = found[1]
    if (algorithm := section.text("kv_cache_quant_algo", "FP8")) != "FP8":  # from hf_quant_config.json
        raise section.error("kv_cache_quant_algo", f"{algorithm!r} is not supported (FP8)")
    scheme = section.section("kv_cache_scheme")
    if scheme is not None:
        num_bits, kind = scheme.integer("num_bits", 8, high=64), scheme.text("type", "float")
        if (num_bits, kind) != (8, "float"):
            raise scheme.error("num_bits", f"{kind}{num_bits} is not supported (float8)")
