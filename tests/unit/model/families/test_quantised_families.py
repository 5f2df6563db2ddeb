"""Every family's golden in fp8 and int4: fused and reordered rows keep their scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.families.llama import Llama
from model.kv_scales import measure_kv_scales
from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.quantised import dequantise
from model.weights.loader import load_model, plan_weights
from model.weights.writer import write_quantised
from tests.support.goldens import IN_OTHERS, NAMES, Golden, relative_error

FAMILIES = [name for name in NAMES if not name.startswith(("llama", "mistral_", "qwen2", "qwen3_bf16", *IN_OTHERS))]
ERRORS = {"fp8": 0.04, "int4-g32": 0.15}
FLOAT32 = np.dtype(np.float32)


def assert_near(model: Llama, golden: Golden, error: float) -> None:
    for layer, whole in zip(model.weights.layers, golden.model(NumpyOps()).weights.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            rounded, expected = getattr(layer, name), getattr(whole, name)
            for index in range(len(expected.data) if expected.data.ndim == 3 else 0):
                assert relative_error(dequantise(rounded.expert(index)), expected.data[index]) < error
            if expected.data.ndim == 2:
                assert relative_error(dequantise(rounded), expected.data) < error
        if layer.router is not None:
            np.testing.assert_array_equal(layer.router.data, whole.router.data)


@pytest.mark.parametrize("format_name", ERRORS)
@pytest.mark.parametrize("name", [name for name in FAMILIES if "ministral" not in name and "olmo2" not in name])
def test_a_written_folder_holds_the_same_matrices(tmp_path: Path, name: str, format_name: str):
    golden = Golden.load(name)
    write_quantised(golden.folder, tmp_path / "out", format_name, lambda written: None)
    config = ModelConfig.read(tmp_path / "out")
    model = load_model(tmp_path / "out", config, NumpyOps(), len(golden.token_ids))
    planned = plan_weights(tmp_path / "out", config, FLOAT32)
    assert planned.num_bytes == model.weights.num_bytes - model.weights.table_bytes
    assert_near(model, golden, ERRORS[format_name])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_rounded_while_it_is_loaded(name: str):
    golden = Golden.load(name)
    config, num_tokens = ModelConfig.read(golden.folder), len(golden.token_ids)
    model = load_model(golden.folder, config, NumpyOps(), num_tokens, quantization="fp8")
    planned = plan_weights(golden.folder, config, FLOAT32, "fp8")
    assert planned.num_bytes == model.weights.num_bytes - model.weights.table_bytes
    assert_near(model, golden, ERRORS["fp8"])
    assert np.isfinite(golden.in_chunks(model, [104], 16)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_fp8_cache(name: str):
    golden = Golden.load(name)
    model = golden.model(NumpyOps(FLOAT32, np.dtype(np.uint8)))
    measure_kv_scales(model, 16, len(golden.token_ids))
    assert relative_error(golden.in_chunks(model, [golden.num_prompt, 32], 16), golden.logits) < 0.12


@pytest.mark.parametrize("name", ["granite_tied_bf16", "olmo3_bf16", "phi4_mini_longrope_bf16", "smollm3_tied_bf16"])
def test_dummy_weights_and_one_layer_of_each_kind(name: str):
    golden = Golden.load(name)
    model = load_model(None, ModelConfig.read(golden.folder), NumpyOps(), len(golden.token_ids), load_format="dummy")
    logits = golden.in_chunks(model.first_layer(), [104], 16)
    assert np.isfinite(logits).all()
