"""A model folder's tensors against its config: names, shapes, values, shards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.presets import PRESETS
from model.weights.checkpoint import Checkpoint, expected_shapes
from model.weights.online_fp8 import loaded_bytes
from tests.support.safetensors_bytes import save

CONFIG = replace(
    PRESETS["llama-3.1-8b"],
    vocab_size=12,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    windows=PRESETS["llama-3.1-8b"].windows[:1],
)
DOWN = "model.layers.0.mlp.down_proj.weight"


def tensors_of(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype]) for name, shape in expected_shapes(config).items()
    }


def save_shards(folder: Path, tensors: dict[str, np.ndarray], index: dict[str, str]) -> None:
    for file_name in set(index.values()):
        save(folder / file_name, {name: tensors[name] for name in tensors if index[name] == file_name})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def read(checkpoint: Checkpoint, name: str, dtype: np.dtype) -> np.ndarray:
    out = np.empty(expected_shapes(CONFIG)[name], dtype)
    checkpoint.read_into(name, 0, out)
    return out


@pytest.mark.parametrize("name", PRESETS)
def test_loaded_bytes_of_the_presets(name: str):
    config = PRESETS[name]
    small = sum(int(np.prod(shape)) for shape in expected_shapes(config).values() if len(shape) == 1)
    is_apart = config.tied_embeddings and not config.shares_embedding
    own_head = config.vocab_size * config.hidden_size if is_apart else 0
    assert sum(loaded_bytes(config, NUMPY_DTYPES["bfloat16"], "auto").values()) == 2 * (
        config.num_parameters + small + own_head
    )


def test_llama31_has_the_tensors_of_the_published_index():
    shapes = expected_shapes(PRESETS["llama-3.1-8b"])
    assert len(shapes) == 291
    assert sum(loaded_bytes(PRESETS["llama-3.1-8b"], NUMPY_DTYPES["bfloat16"], "auto").values()) == 16_060_522_496
    assert shapes["model.layers.31.self_attn.k_proj.weight"] == (1024, 4096)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_reads_in_any_dtype(tmp_path: Path, stored: str, wanted: str):
    tensors = tensors_of(CONFIG, stored)
    save(tmp_path / "model.safetensors", tensors)
    array = read(Checkpoint.open(tmp_path, CONFIG), DOWN, NUMPY_DTYPES[wanted])
    assert array.dtype == NUMPY_DTYPES[wanted]
    np.testing.assert_array_equal(array, tensors[DOWN].astype(NUMPY_DTYPES[wanted]))


def test_rotary_frequencies_and_a_tied_head_are_passed_over(tmp_path: Path):
    tied = replace(CONFIG, tied_embeddings=True)
    tensors = tensors_of(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save(tmp_path / "model.safetensors", tensors)
    Checkpoint.open(tmp_path, CONFIG)
    Checkpoint.open(tmp_path, tied)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    tensors = tensors_of(CONFIG)
    save(path, {name: array for name, array in tensors.items() if name != DOWN})
    with pytest.raises(ModelError, match=f"tensor '{DOWN}': missing"):
        Checkpoint.open(tmp_path, CONFIG)
    save(path, {name: array for name, array in tensors.items() if "mlp" not in name})
    with pytest.raises(ModelError, match=r"tensor '.*gate_proj.weight' and 2 more: missing"):
        Checkpoint.open(tmp_path, CONFIG)
    save(path, {**tensors, "model.layers.0.self_attn.q_proj.bias": np.ones(16, np.float32)})
    with pytest.raises(ModelError, match=r"tensor '.*q_proj.bias': no part of this model"):
        Checkpoint.open(tmp_path, CONFIG)
    save(path, {**tensors, DOWN: tensors[DOWN].T.copy()})
    with pytest.raises(ModelError, match=rf"{path}: tensor '{DOWN}': shape \(24, 16\), but config.json makes it"):
        Checkpoint.open(tmp_path, CONFIG)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_read_and_named(tmp_path: Path, dtype: str, value: float):
    tensors = tensors_of(CONFIG, dtype)
    tensors[DOWN][3, 5] = value
    save(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint.open(tmp_path, CONFIG)
    for wanted in ("float32", "float16", "bfloat16"):
        assert not np.isfinite(read(checkpoint, DOWN, NUMPY_DTYPES[wanted])[3, 5])
        received = f"{tmp_path / 'model.safetensors'}: tensor '{DOWN}': holds NaN or infinity"
        assert str(checkpoint.nonfinite(DOWN, NUMPY_DTYPES[wanted])) == received


def test_what_float16_cannot_hold_is_named(tmp_path: Path):
    tensors = tensors_of(CONFIG)
    tensors[DOWN][0, 0] = 1e6
    save(tmp_path / "model.safetensors", tensors)
    checkpoint, float16 = Checkpoint.open(tmp_path, CONFIG), NUMPY_DTYPES["float16"]
    assert np.isinf(read(checkpoint, DOWN, float16)[0, 0])
    assert str(checkpoint.nonfinite(DOWN, float16)).endswith(f"tensor '{DOWN}': holds values too large for float16")


def test_shards(tmp_path: Path):
    tensors = tensors_of(CONFIG)
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    save_shards(tmp_path, tensors, index)
    checkpoint = Checkpoint.open(tmp_path, CONFIG)
    for name, array in tensors.items():
        np.testing.assert_array_equal(read(checkpoint, name, array.dtype), array)


@pytest.mark.parametrize(
    "file_name",
    ["../secret.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "C:x.safetensors", "x.bin", 3, None],
)
def test_an_index_stays_in_its_folder(tmp_path: Path, file_name: object):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(ModelError, match="is no file of this folder"):
        Checkpoint.open(tmp_path, CONFIG)


def test_an_index_that_lies(tmp_path: Path):
    tensors = tensors_of(CONFIG)
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    save_shards(tmp_path, tensors, index)
    swapped = {**index, DOWN: "model-0.safetensors" if index[DOWN].startswith("model-1") else "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(ModelError, match=f"tensor '{DOWN}': not in this file by the index"):
        Checkpoint.open(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**index, "ghost": "model-0.safetensors"}})
    )
    with pytest.raises(ModelError, match="tensor 'ghost': missing, though the index names it"):
        Checkpoint.open(tmp_path, CONFIG)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="weight_map"):
        Checkpoint.open(tmp_path, CONFIG)


def test_a_shard_or_everything_missing(tmp_path: Path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"gone\.safetensors: cannot be read"):
        Checkpoint.open(tmp_path, CONFIG)
