"""Loading: what is fused, converted, shared and counted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.kv_cache import allocate, block_bytes
from model.ops.cpu.ops import NumpyOps
from model.weights.checkpoint import Checkpoint, expected_shapes
from model.weights.loader import allocate_model, load_model
from model.weights.online_fp8 import loaded_bytes
from model.weights.safetensors_file import read_safetensors
from tests.support.goldens import FOLDER, Golden, relative_error
from tests.support.paged import PagedSequences


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_drawn_on_a_terminal_and_not_into_a_log(monkeypatch, capsys, is_terminal):
    folder = FOLDER / "qwen2_bf16"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    allocate_model(folder, ModelConfig.read(folder), NumpyOps(), 16).load(progress=True)
    assert ("100%" in capsys.readouterr().err) == is_terminal


def test_qkv_and_gate_up_are_stacked_in_that_order():
    folder = FOLDER / "qwen2_bf16"
    config, float32 = ModelConfig.read(folder), NUMPY_DTYPES["float32"]
    checkpoint, shapes = Checkpoint.open(folder, config), expected_shapes(config)
    layer = load_model(folder, config, NumpyOps(), 16).weights.layers[1]

    def stored(*names: str) -> np.ndarray:
        parts = [np.empty(shapes[f"model.layers.1.{name}"], float32) for name in names]
        for name, part in zip(names, parts, strict=True):
            checkpoint.read_into(f"model.layers.1.{name}", 0, part)
        return np.concatenate(parts)

    projections = [f"self_attn.{letter}_proj" for letter in "qkv"]
    np.testing.assert_array_equal(layer.qkv.data, stored(*[f"{name}.weight" for name in projections]))
    np.testing.assert_array_equal(layer.qkv_bias, stored(*[f"{name}.bias" for name in projections]))
    np.testing.assert_array_equal(layer.gate_up.data, stored("mlp.gate_proj.weight", "mlp.up_proj.weight"))
    assert layer.output_bias is layer.gate_up_bias is layer.down_bias is layer.q_norm is None


def test_tied_embeddings_are_one_array():
    folder = FOLDER / "llama32_tied_bf16"
    weights = load_model(folder, ModelConfig.read(folder), NumpyOps(), 16).weights
    assert weights.lm_head.data is weights.embedding


class StagingOps(NumpyOps):
    def __init__(self):
        super().__init__()
        self.log = []

    def load_parallel(self, targets, read):
        self.log.append("load")
        super().load_parallel(targets, read)

    def release_staging(self):
        self.log.append("release")


def test_staging_is_released_once_after_all_weights(monkeypatch):
    monkeypatch.setattr("model.weights.online_fp8.STAGING_BYTES", 1)
    folder, ops = FOLDER / "qwen3_bf16", StagingOps()
    load_model(folder, ModelConfig.read(folder), ops, 16, quantization="fp8")
    assert ops.log.count("load") > 2
    assert ops.log[-1] == "release"
    assert ops.log.count("release") == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dummy_weights_need_no_folder_and_make_sense(dtype: str):
    config = replace(ModelConfig.read(FOLDER / "qwen3_bf16"), qkv_bias=True)
    ops = NumpyOps(NUMPY_DTYPES[dtype])
    model = load_model(None, config, ops, 32, load_format="dummy")
    assert model.weights.layers[0].qkv.data.dtype == ops.dtype
    logits = PagedSequences(model, 1, 32, 16).forward([(0, np.arange(20))])[0]
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


def test_loading_without_a_folder_is_refused():
    with pytest.raises(ModelError, match="without a model folder"):
        load_model(None, ModelConfig.read(FOLDER / "qwen3_bf16"), NumpyOps(), 32)


def test_loaded_bytes_is_what_is_loaded():
    folder = FOLDER / "llama_biases_sharded_fp32"
    config = ModelConfig.read(folder)
    weights = load_model(folder, config, NumpyOps(), 16).weights
    assert weights.num_bytes - weights.table_bytes == sum(
        loaded_bytes(config, NUMPY_DTYPES["float32"], "auto").values()
    )


def test_rope_tables_end_with_the_longest_sequence():
    golden = Golden.load("llama31_bf16")
    assert golden.model(NumpyOps()).weights.layers[0].rotation.cos.shape == (len(golden.token_ids), 32)


def test_a_folder_of_links_loads_the_same(tmp_path: Path):
    golden = Golden.load("llama3_gqa_bf16")
    for path in golden.folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    linked = replace(golden, folder=tmp_path)
    assert relative_error(linked.in_chunks(linked.model(NumpyOps()), [104], 16), golden.logits) < 1e-4


def test_kv_cache_blocks_are_one_piece():
    config = ModelConfig.read(FOLDER / "llama3_gqa_bf16")
    ops = NumpyOps(NUMPY_DTYPES["bfloat16"])
    kv = allocate(ops, config, 7, 16)
    assert kv.shape == (7, 2, 2, 1, 16, 64)
    assert kv.dtype == ops.dtype
    assert kv[0].nbytes == block_bytes(config, 16, ops.dtype) == kv.strides[0]


def test_a_fault_in_one_tensor_ends_the_load_with_its_name(tmp_path: Path):
    golden = Golden.load("llama3_gqa_bf16")
    for path in golden.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "model.safetensors"
    tensor = read_safetensors(file)["model.layers.1.mlp.up_proj.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.offset + 6 : tensor.offset + 8] = b"\xc0\x7f"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=f"{file}: tensor '{tensor.name}': holds NaN or infinity"):
        replace(golden, folder=tmp_path).model(NumpyOps())
