"""Stored scales of an fp8 cache: every spelling, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from model.weights.safetensors_file import read_safetensors
from tests.support.safetensors_bytes import save

FOLDER = Path(__file__).parent / "formats" / "goldens" / "fp8_dynamic"
ATTENTION = "model.layers.{}.self_attn."
NUM_LAYERS, NUM_KV_HEADS = (ModelConfig.read(FOLDER).num_layers, ModelConfig.read(FOLDER).num_kv_heads)
FP8_OPS = NumpyOps(kv_dtype=np.dtype(np.uint8))


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def per_layer(k_name: str, v_name: str) -> dict[str, np.ndarray]:
    """Keys have 0.5, 1.5, ... by layer, values a quarter more."""
    found = {}
    for layer in range(NUM_LAYERS):
        found[ATTENTION.format(layer) + k_name] = scalar(layer + 0.5)
        found[ATTENTION.format(layer) + v_name] = scalar(layer + 0.75)
    return found


def folder_with(folder: Path, scales: dict[str, np.ndarray], scheme: Any = None) -> Path:
    shutil.copytree(FOLDER, folder)
    tensors = {name: tensor.values() for name, tensor in read_safetensors(folder / "model.safetensors").items()}
    save(folder / "model.safetensors", tensors | scales)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def loaded(folder: Path, ops: NumpyOps = FP8_OPS) -> Any:
    return load_model(folder, ModelConfig.read(folder), ops, 16).weights


SPELLINGS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
]


@pytest.mark.parametrize("names", SPELLINGS)
def test_every_spelling(tmp_path: Path, names: tuple[str, str]):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    unused = {ATTENTION.format(0) + "q_scale": scalar(3), ATTENTION.format(1) + "prob_scale": scalar(3)}
    folder = folder_with(tmp_path / "model", per_layer(*names) | unused, scheme)
    weights = loaded(folder)
    assert weights.has_stored_kv_scales
    for layer in range(NUM_LAYERS):
        np.testing.assert_array_equal(weights.kv_scales[layer, 0], layer + 0.5)
        np.testing.assert_array_equal(weights.kv_scales[layer, 1], layer + 0.75)
    assert loaded(folder, NumpyOps()).kv_scales is None


def test_one_scale_of_both_sides(tmp_path: Path):
    scales = {ATTENTION.format(layer) + "kv_scale": np.array([0.25], np.float16) for layer in range(NUM_LAYERS)}
    np.testing.assert_array_equal(loaded(folder_with(tmp_path / "model", scales)).kv_scales, 0.25)


@pytest.mark.parametrize("shape", [(NUM_KV_HEADS,), (NUM_KV_HEADS, 1, 1)])
def test_one_scale_for_each_head(tmp_path: Path, shape: tuple[int, ...]):
    by_head = np.arange(1, NUM_KV_HEADS + 1, dtype=np.float32) / 8
    scales = {name: by_head.reshape(shape) for name in per_layer("k_scale", "v_scale")}
    found = loaded(folder_with(tmp_path / "model", scales)).kv_scales
    np.testing.assert_array_equal(found, np.broadcast_to(by_head, found.shape))


def test_without_stored_scales_they_are_one_until_measured(tmp_path: Path):
    weights = loaded(FOLDER)
    assert not weights.has_stored_kv_scales
    np.testing.assert_array_equal(weights.kv_scales, 1)


K0 = ATTENTION.format(0) + "k_scale"
MALFORMED = [
    ({K0: scalar(0)}, None, f"'{K0}': holds a scale that is zero"),
    ({K0: scalar(-1)}, None, f"'{K0}': holds a scale that is zero or negative"),
    ({K0: scalar(np.nan)}, None, f"'{K0}': holds NaN or infinity"),
    ({K0: scalar(np.inf)}, None, f"'{K0}': holds NaN or infinity"),
    ({K0: np.ones(7, np.float32)}, None, f"'{K0}': shape is [7]"),
    ({K0: np.ones((), np.int32)}, None, f"'{K0}': dtype is I32"),
    ({ATTENTION.format(0) + "kv_scale": scalar(1)}, None, "is a second scale of one side"),
    ({ATTENTION.format(0) + "attn.k_scale": scalar(1)}, None, "is a second scale of one side"),
    ({ATTENTION.format(NUM_LAYERS) + "k_scale": scalar(1)}, None, "is no part of this model"),
    ({}, {"num_bits": 8, "type": "int"}, "kv_cache_scheme: num_bits: int8 is not supported (float8)"),
    ({}, {"num_bits": 4, "type": "float"}, "kv_cache_scheme: num_bits: float4 is not supported (float8)"),
    ({}, "fp8", "kv_cache_scheme: not an object"),
]


@pytest.mark.parametrize(("changes", "scheme", "problem"), MALFORMED)
def test_malformed_scales_are_refused(tmp_path: Path, changes: dict[str, np.ndarray], scheme: Any, problem: str):
    folder = folder_with(tmp_path / "model", per_layer("k_scale", "v_scale") | changes, scheme)
    with pytest.raises(ModelError, match=re.escape(problem)) as error:
        loaded(folder)
    assert "\n" not in str(error.value)
    assert loaded(folder, NumpyOps()).kv_scales is None  # unused


def test_a_scheme_of_another_type_is_refused_without_scales(tmp_path: Path):
    with pytest.raises(ModelError, match="kv_cache_scheme: num_bits: int8 is not supported"):
        loaded(folder_with(tmp_path / "model", {}, {"num_bits": 8, "type": "int"}))


def test_a_layer_without_scales_is_refused(tmp_path: Path):
    scales = per_layer("k_scale", "v_scale")
    del scales[ATTENTION.format(1) + "v_scale"]
    with pytest.raises(ModelError, match="layer 1 has no v_scale"):
        loaded(folder_with(tmp_path / "model", scales))
