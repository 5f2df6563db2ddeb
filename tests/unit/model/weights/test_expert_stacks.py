"""Experts of a layer in one tensor: the same weights as a tensor for each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.weights.checkpoint import Checkpoint
from model.weights.loader import load_model
from model.weights.safetensors_file import read_safetensors
from tests.support.goldens import FOLDER
from tests.support.safetensors_bytes import save

QUANTISED = FOLDER.parent / "weights" / "formats" / "goldens"
EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)\.weight(.*)")
PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
CASES = {
    "qwen3_moe": FOLDER / "qwen3_moe_bf16",
    "mixtral": FOLDER / "mixtral_bf16",
    "fp8 blocks": QUANTISED / "qwen3_moe_fp8_block",
}


def stacked(folder: Path) -> dict[str, np.ndarray]:
    """A folder's tensors, named and stacked as `save_pretrained(save_original_format=False)` does."""
    tensors: dict[str, np.ndarray] = {}
    parts: dict[tuple[str, str], tuple[list[np.ndarray], ...]] = {}
    for name, tensor in sorted(read_safetensors(folder / "model.safetensors").items()):
        if (found := EXPERT.fullmatch(name)) is None:
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensor.values()
        else:
            own = parts.setdefault((found[1], found[3].removeprefix("weight")), ([], [], []))
            own[PARTS[found[2]]].append(tensor.values())
    for (layer, suffix), (gates, ups, downs) in parts.items():
        tensors[f"{layer}mlp.experts.gate_up_proj{suffix}"] = np.concatenate([np.stack(gates), np.stack(ups)], axis=1)
        tensors[f"{layer}mlp.experts.down_proj{suffix}"] = np.stack(downs)
    return tensors


def load(folder: Path) -> Llama:
    return load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)


@pytest.mark.parametrize("case", CASES)
def test_a_stacked_folder_holds_the_same_weights(tmp_path: Path, case: str):
    shutil.copy(CASES[case] / "config.json", tmp_path)
    tensors = stacked(CASES[case])
    assert any(name.endswith("gate_up_proj") for name in tensors)
    save(tmp_path / "model.safetensors", tensors)
    for layer, expected in zip(load(tmp_path).weights.layers, load(CASES[case]).weights.layers, strict=True):
        np.testing.assert_array_equal(layer.router.data, expected.router.data)
        for name in ("gate_up", "down"):
            weight, wanted = getattr(layer, name), getattr(expected, name)
            np.testing.assert_array_equal(weight.data, wanted.data)
            assert weight.scale is None or np.array_equal(weight.scale, wanted.scale)


def test_a_scale_of_each_expert_is_that_of_gate_and_up(tmp_path: Path):
    folder = CASES["fp8 blocks"]
    tensors = stacked(folder)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("proj_scale_inv")]:
        tensors[name] = rng.uniform(0.5, 1, (len(tensors[name]), 1, 1)).astype(np.float32)
    prefix = "model.layers.0.mlp.experts."
    save(tmp_path / "model.safetensors", tensors)
    shutil.copy(folder / "config.json", tmp_path)
    checkpoint = Checkpoint.open(tmp_path, ModelConfig.read(tmp_path))
    for module, stack in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
        scale = np.empty(1, np.float32)
        matrix = checkpoint.matrix(f"{prefix}2.{module}.weight")
        assert matrix is not None
        matrix.arrays["scale"].read_into(0, scale)
        assert scale[0] == tensors[f"{prefix}{stack}_scale_inv"][2, 0, 0]


def test_a_stack_of_another_shape_is_refused(tmp_path: Path):
    tensors = stacked(CASES["qwen3_moe"])
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name].swapaxes(1, 2).copy()
    save(tmp_path / "model.safetensors", tensors)
    shutil.copy(CASES["qwen3_moe"] / "config.json", tmp_path)
    problem = rf"{re.escape(name)}': shape is \[8, 32, 64\], but the config makes it \[8, 64, 32\]"
    with pytest.raises(ModelError, match=problem):
        load(tmp_path)
