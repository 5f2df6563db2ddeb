"""Quantised folders with one fault each: one line that names it, and nothing is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from model.weights.safetensors_file import read_safetensors
from tests.support.safetensors_bytes import save

GOLDENS = Path(__file__).parent / "goldens"
Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
Change = Callable[[Config, Tensors], None]


def put(name: str, array: Any) -> Change:
    """Replace a tensor, or change it if `array` is a function of it."""
    return lambda config, tensors: tensors.update({name: array(tensors[name]) if callable(array) else array})


def drop(name: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(name)


def say(**fields: Any) -> Change:
    return lambda config, tensors: config.update(fields)


def in_group(side: str, **fields: Any) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        group = config["config_groups"]["group_0"]
        group[side] = None if fields.get("null") else {**(group[side] or {}), **fields}

    return change


def put_router_in_fp8(config: Config, tensors: Tensors) -> None:
    name = "model.layers.0.mlp.gate.weight"
    config["modules_to_not_convert"] = None
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)


def leave_out_an_expert(config: Config, tensors: Tensors) -> None:
    expert = "model.layers.0.mlp.experts.1"
    config["modules_to_not_convert"] = [expert]
    for name in [name for name in tensors if name.startswith(f"{expert}.")]:
        if name.endswith("_scale_inv"):
            del tensors[name]
        else:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)


def filled(index: tuple[int, ...], value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A copy with one element changed."""

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


def as_dense(name: str) -> Change:
    """Replace a module's tensors by a plain weight."""

    def change(config: Config, tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith(f"{name}.")]:
            del tensors[key]
        tensors[f"{name}.weight"] = np.zeros((128, 64), ml_dtypes.bfloat16)

    return change


def shifted_groups(array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1)


def all_in_one_group(array: np.ndarray) -> np.ndarray:
    return np.zeros_like(array)


def state_of_blocks(block: int) -> np.ndarray:
    return np.frombuffer(json.dumps({"blocksize": block, "shape": [128, 64]}).encode(), np.uint8)


E4M3_NAN = np.uint8(0x7F).view(ml_dtypes.float8_e4m3fn)
NEGATIVE_NAN = np.uint8(0xFF).view(ml_dtypes.float8_e4m3fn)

MALFORMED: list[tuple[str, str, Change]] = [
    ("fp8_dynamic", "quant_method: 'hqq' is not supported", say(quant_method="hqq")),
    ("fp8_dynamic", "quant_method: 7 is not a string", say(quant_method=7)),
    ("fp8_dynamic", "format: 'marlin-24' is not supported", say(format="marlin-24")),
    ("fp8_dynamic", "quantization_status: 'frozen' is not supported", say(quantization_status="frozen")),
    ("fp8_dynamic", "config_groups: is not an object of 1 to 64 groups", say(config_groups={})),
    ("fp8_dynamic", "ignore: is not a list of strings", say(ignore="lm_head")),
    ("fp8_dynamic", "ignore: .* repeats a group", say(ignore=["re:(a+)+b"])),
    ("fp8_dynamic", "ignore: '\\[' is not a regular expression", say(ignore=["re:["])),
    ("fp8_dynamic", f"'{Q}.weight_scale': is quantised, but .* ignore leaves it out", say(ignore=["lm_head", Q])),
    ("fp8_dynamic", f"'{Q}.weight': is not quantised, but .* quantises it", as_dense(Q)),
    ("fp8_dynamic", f"'{Q}.weight_scale': missing", drop(f"{Q}.weight_scale")),
    ("fp8_dynamic", f"'{Q}.weight': holds NaN", put(f"{Q}.weight", filled((3, 5), E4M3_NAN))),
    ("fp8_dynamic", f"'{Q}.weight': holds NaN", put(f"{Q}.weight", filled((127, 63), NEGATIVE_NAN))),
    ("fp8_dynamic", f"'{Q}.weight_scale': holds a scale that is zero", put(f"{Q}.weight_scale", filled((9, 0), 0))),
    ("fp8_dynamic", f"'{Q}.weight_scale': holds a scale that is zero", put(f"{Q}.weight_scale", filled((9, 0), -1))),
    ("fp8_dynamic", f"'{Q}.weight_scale': holds NaN or infinity", put(f"{Q}.weight_scale", filled((0, 0), np.inf))),
    ("fp8_dynamic", f"'{Q}.weight_scale': shape is", put(f"{Q}.weight_scale", lambda scale: scale[:-1])),
    ("fp8_dynamic", f"'{Q}.weight': dtype is I8", put(f"{Q}.weight", lambda weight: weight.view(np.int8))),
    ("fp8_dynamic", f"'{Q}.g_idx': g_idx is no part", put(f"{Q}.g_idx", np.zeros(64, np.int32))),
    ("fp8_dynamic", "num_bits: float-quantized has 8 symmetric bits", in_group("weights", num_bits=4)),
    ("fp8_dynamic", "strategy: 'group' is not supported", in_group("weights", strategy="group")),
    ("fp8_dynamic", "num_bits: int8 is not supported", in_group("input_activations", type="int")),
    ("fp8_dynamic", "weights: missing", in_group("weights", null=True)),
    ("fp8_static", f"'{Q}.input_scale': holds NaN", put(f"{Q}.input_scale", np.array([np.nan], np.float32))),
    ("fp8_block", "num_bits: float4 is not supported", in_group("input_activations", num_bits=4)),
    ("deepseek_block", "weight_block_size: .* is not supported", say(weight_block_size=[64, 64])),
    ("deepseek_block", f"'{Q}.weight_scale_inv': shape is", put(f"{Q}.weight_scale_inv", lambda scale: scale.T.copy())),
    ("deepseek_block", "fmt: 'e5m2' is not supported", say(fmt="e5m2")),
    ("int8_w8a8", f"'{Q}.weight_zero_point': is not 0", put(f"{Q}.weight_zero_point", np.ones((128, 1), np.int8))),
    ("int4_packed", "num_bits: int3 is not supported", in_group("weights", num_bits=3)),
    ("int4_packed", "actorder: is not supported", in_group("weights", actorder="group")),
    ("int4_packed", f"'{Q}.weight_packed': shape is", put(f"{Q}.weight_packed", lambda words: words[:, 1:].copy())),
    ("int4_packed", f"'{Q}.weight_shape': says", put(f"{Q}.weight_shape", np.array([128, 63]))),
    ("int4_packed", f"'{Q}.weight_scale': shape is", in_group("weights", group_size=16)),
    ("int4_packed_asym", f"'{Q}.weight_zero_point': missing", drop(f"{Q}.weight_zero_point")),
    ("nvfp4", f"'{Q}.weight_global_scale': missing", drop(f"{Q}.weight_global_scale")),
    ("nvfp4", f"'{Q}.weight_scale': holds NaN", put(f"{Q}.weight_scale", filled((0, 0), E4M3_NAN))),
    ("mxfp4", f"'{Q}.weight_scale': holds NaN", put(f"{Q}.weight_scale", filled((0, 0), 255))),
    ("gptq", "bits: 3 is not supported", say(bits=3)),
    ("gptq", "checkpoint_format: 'marlin' is not supported", say(checkpoint_format="marlin")),
    ("gptq", f"'{Q}.qzeros': holds a zero point other than 8", say(checkpoint_format="gptq_v2")),
    ("gptq", f"'{Q}.g_idx': reorders the inputs", put(f"{Q}.g_idx", shifted_groups)),
    ("gptq", f"'{Q}.scales': shape is", say(group_size=64)),
    ("gptq", f"'{Q}.bias': is not 0, but the model has no such bias", put(f"{Q}.bias", np.ones(128, np.float16))),
    ("gptq_desc_act", f"'{Q}.g_idx': is no order of groups", put(f"{Q}.g_idx", all_in_one_group)),
    ("gptq_desc_act", f"{Q} and {K}: g_idx differs", put(f"{K}.g_idx", shifted_groups)),
    ("gptq", f"{Q} and {K}: are in two formats", say(dynamic={".*k_proj": {"sym": False}})),
    ("gptq", "dynamic: .* is not a regular expression", say(dynamic={"-:*": {}})),
    ("awq", "version: 'gemv' is not supported", say(version="GEMV")),
    ("awq", "checkpoint_format: 'gemv' is not supported", say(checkpoint_format="gemv")),
    ("awq", "is quantised, but .*modules_to_not_convert leaves it out", say(modules_to_not_convert=["self_attn"])),
    ("awq", "is quantised, but .*dynamic leaves it out", say(dynamic={r"-:.*q_proj": {}})),
    ("qwen3_moe_fp8_block", "mlp.gate: a router in fp8-block is not supported", put_router_in_fp8),
    ("qwen3_moe_fp8_block", "gate_proj: is quantised, but .*experts.1.*, is in 16 bits", leave_out_an_expert),
    ("awq", f"'{Q}.scales': holds NaN", put(f"{Q}.scales", filled((1, 1), np.nan))),
    ("awq", "is quantised, but .*modules_to_not_convert leaves it out", say(modules_to_not_convert=["q_proj"])),
    ("nf4", "load_in_4bit: 8-bit weights are not supported", say(load_in_4bit=False)),
    ("nf4", f"'{Q}.weight.quant_map': shape is", put(f"{Q}.weight.quant_map", np.zeros(8, np.float32))),
    ("nf4", "blocksize: 24 does not divide", put(f"{Q}.weight.quant_state.bitsandbytes__nf4", state_of_blocks(24))),
    ("nf4_nested", f"'{Q}.weight.nested_absmax': holds NaN", put(f"{Q}.weight.nested_absmax", filled((0,), np.nan))),
]


def broken_folder(folder: Path, golden: str, change: Change) -> Path:
    shutil.copytree(GOLDENS / golden, folder)
    raw = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.values() for name, tensor in read_safetensors(folder / "model.safetensors").items()}
    change(raw["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(raw))
    save(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize(("golden", "problem", "change"), MALFORMED)
def test_a_malformed_folder_is_refused_by_name(tmp_path: Path, golden: str, problem: str, change: Change):
    folder = broken_folder(tmp_path / "model", golden, change)
    with pytest.raises(ModelError, match=problem) as error:
        load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value) or "model.layers.0." in str(error.value)


def test_zero_biases_of_every_matrix_are_left_out(tmp_path: Path):
    change = put(f"{Q}.bias", np.zeros(128, np.float16))
    folder = broken_folder(tmp_path / "model", "gptq", change)
    load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)


def test_there_are_forty():
    assert len(MALFORMED) >= 40


def test_a_state_that_is_not_json(tmp_path: Path):
    change = put(f"{Q}.weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"{]", np.uint8))
    folder = broken_folder(tmp_path / "model", "nf4", change)
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)


CONFLICTS = [
    ("gptq", "quantize_config.json", {"bits": 4, "sym": False}, "sym: False contradicts .*config.json.* \\(True\\)"),
    ("gptq", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "quant_method: 'modelopt' contradicts"),
    ("awq", "quant_config.json", {"zero_point": False}, "zero_point: False contradicts"),
]


@pytest.mark.parametrize(("golden", "file_name", "other", "problem"), CONFLICTS)
def test_two_files_that_disagree(tmp_path: Path, golden: str, file_name: str, other: Config, problem: str):
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / golden, folder)
    same = json.loads((folder / "config.json").read_text())["quantization_config"]
    (folder / file_name).write_text(json.dumps(same | other))
    with pytest.raises(ModelError, match=f"{file_name}.*{problem}"):
        load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)
    (folder / file_name).unlink()
    agreeing = "quant_config.json" if golden == "awq" else "quantize_config.json"
    (folder / agreeing).write_text(json.dumps(same | ({"version": "GEMM"} if golden == "awq" else {})))
    load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)


def test_quantised_tensors_without_a_config(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "fp8_dynamic", folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="weight_scale' and 13 more: no part of this model"):
        load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)
