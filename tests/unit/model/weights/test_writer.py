"""Folders that `quire quantize` writes: what they hold, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.quantised import dequantise
from model.ops.weight import WeightFormat
from model.weights.loader import load_model
from model.weights.writer import quantise_fp8, quantise_int4, write_quantised
from service.cli.main import main
from tests.support.goldens import FOLDER

DEMO = Path(__file__).parents[4] / "model" / "demo"
FORMATS = {"fp8": WeightFormat.FP8, "int4-g128": WeightFormat.INT4, "int4-g32": WeightFormat.INT4}


@pytest.mark.parametrize("name", FORMATS)
def test_the_demo_model_in_each_format(tmp_path: Path, name: str):
    num_bytes = write_quantised(DEMO, tmp_path / "out", name, lambda written: None)
    config = ModelConfig.read(tmp_path / "out")
    assert config == ModelConfig.read(DEMO)
    assert num_bytes == pytest.approx({"fp8": 6.0, "int4-g128": 4.05, "int4-g32": 4.2}[name] * 2**20, rel=0.02)
    layer = load_model(tmp_path / "out", config, NumpyOps(), 16).weights.layers[3]
    original = load_model(DEMO, config, NumpyOps(), 16).weights.layers[3]
    for matrix in ("qkv", "output", "gate_up", "down"):
        written, stored = getattr(layer, matrix), getattr(original, matrix).data
        assert (written.format, written.quantised_input) == (FORMATS[name], name == "fp8")
        error = np.abs(dequantise(written) - stored)
        if name == "fp8":
            assert (error <= np.abs(stored) / 16 + written.scale[:, None] * 2**-9).all()  # half a step of 3 bits
        else:  # half a step, one at the positive end, which is 7 and not 7.5
            steps = np.repeat(written.scale.astype(np.float32), written.group_size, axis=1)
            assert (error <= 0.55 * steps).all()
    copied = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert copied == sorted(path.name for path in DEMO.iterdir() if path.is_file())


def test_zeros_get_a_scale_of_one():
    data, scale = quantise_fp8(np.zeros((2, 32), np.float32))
    assert (scale == 1).all()
    assert not data.astype(np.float32).any()
    words, scale = quantise_int4(np.zeros((2, 32), np.float32), 32)
    assert (scale == 1).all()
    assert (words.view(np.uint32) == 0x88888888).all()


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def refusal(*flags: str) -> str:
        assert main(["quantize", *flags]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "out")
    golden = str(FOLDER / "qwen2_bf16")  # 96 inputs
    assert "--format: 'int3' is not supported (fp8, int4-g128" in refusal(
        "--model", golden, "--format", "int3", "--out", out
    )
    assert "has 96 inputs, no multiple of 128" in refusal("--model", golden, "--format", "int4-g128", "--out", out)
    assert "no such folder" in refusal("--model", out + "/no", "--format", "fp8", "--out", out)
    assert main(["quantize", "--model", golden, "--format", "fp8", "--out", out]) == 0
    assert "is not empty" in refusal("--model", golden, "--format", "fp8", "--out", out)
    assert "is quantised already" in refusal("--model", out, "--format", "fp8", "--out", str(tmp_path / "again"))


def test_a_folder_without_its_config_does_not_load(tmp_path: Path):
    write_quantised(FOLDER / "qwen2_bf16", tmp_path / "out", "fp8", lambda written: None)
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        ModelConfig.read(tmp_path / "out")


def test_shards_become_one_file(tmp_path: Path):
    source = FOLDER / "llama_biases_sharded_fp32"
    write_quantised(source, tmp_path / "out", "fp8", lambda written: None)
    config = ModelConfig.read(tmp_path / "out")
    layer = load_model(tmp_path / "out", config, NumpyOps(), 16).weights.layers[0]
    original = load_model(source, config, NumpyOps(), 16).weights.layers[0]
    np.testing.assert_array_equal(layer.qkv_bias, original.qkv_bias)
    assert not list((tmp_path / "out").glob("*.index.json"))


def test_online_fp8_of_a_quantised_folder_is_refused(tmp_path: Path):
    write_quantised(FOLDER / "qwen2_bf16", tmp_path / "out", "fp8", lambda written: None)
    with pytest.raises(ModelError, match="is quantised already"):
        load_model(tmp_path / "out", ModelConfig.read(tmp_path / "out"), NumpyOps(), 16, quantization="fp8")


def test_nan_is_refused(tmp_path: Path):
    shutil.copytree(FOLDER / "qwen2_bf16", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2:] = b"\xc0\x7f"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="holds NaN or infinity"):
        write_quantised(tmp_path / "model", tmp_path / "out", "fp8", lambda written: None)


def test_the_config_is_that_of_compressed_tensors(tmp_path: Path):
    write_quantised(DEMO, tmp_path / "out", "int4-g128", lambda written: None)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weights = written["config_groups"]["group_0"]["weights"]
    assert (written["quant_method"], written["format"]) == ("compressed-tensors", "pack-quantized")
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, 128, "group")
