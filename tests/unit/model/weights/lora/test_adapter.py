"""Folders of adapters, and refusals: one line that names the file and the field or tensor."""

import json
from dataclasses import replace

import numpy as np
import pytest

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.weights.lora.adapter import adapts_experts, read_adapter
from tests.support.adapters import write_adapter
from tests.support.demo_engine import DEMO
from tests.support.goldens import FOLDER as GOLDENS
from tests.support.safetensors_bytes import save, write

FLOAT32 = np.dtype(np.float32)
Q = "base_model.model.model.layers.0.self_attn.q_proj"
TARGETS = ("q_proj", "v_proj")
ABSENT = object()

CONFIGS = {
    "peft_type": ({"peft_type": "IA3"}, "peft_type: 'IA3' is not supported (LORA)"),
    "no peft_type": ({"peft_type": None}, "peft_type: None is not supported"),
    "task": ({"task_type": "SEQ_CLS"}, "task_type: 'SEQ_CLS' is not supported"),
    "no rank": ({"r": None}, "r: missing"),
    "rank 0": ({"r": 0}, "r: 0 is outside 1..512"),
    "rank of text": ({"r": "8"}, "r: '8' is not an integer"),
    "high rank": ({"r": 128}, "r: rank 128 exceeds --max-lora-rank (64)"),
    "high rank of a module": ({"rank_pattern": {"q_proj": 65}}, "rank 65 exceeds --max-lora-rank (64)"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha: None is not a number above 0"),
    "alpha 0": ({"lora_alpha": 0}, "lora_alpha: 0 is not a number above 0"),
    "rslora of text": ({"use_rslora": "yes"}, "use_rslora: 'yes' is not true or false"),
    "bias": ({"bias": "lora_only"}, "bias: 'lora_only' is not supported (none)"),
    "DoRA": ({"use_dora": True}, "use_dora: DoRA is not supported"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules are not supported"),
    "lora_bias": ({"lora_bias": True}, "lora_bias: biases are not supported"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out: transposed weights"),
    "trained tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices: trained embeddings"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication: replicated layers"),
    "experts": (
        {"target_parameters": ["experts.w1"]},
        "target_parameters: 'experts.w1' is not supported",
    ),
    "activated": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens: activated LoRA"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' changes the base model's weights"),
    "unknown switch": ({"use_wonders": True}, "use_wonders: is not known here"),
    "no targets": ({"target_modules": None}, "target_modules: not a list of names"),
    "unknown target": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: 'lm_head' is not supported (q_proj"),
    "broken expression": ({"target_modules": "(q_proj"}, "target_modules: '(q_proj' is not a regular expression"),
    "missing module": ({"target_modules": ["q_proj", "o_proj", "v_proj"]}, "self_attn.o_proj, which target_modules"),
    "rank by expression": ({"rank_pattern": {".*q_proj": 8}}, "rank_pattern: key '.*q_proj' is a regular expression"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj: 0 is not a rank"),
    "alphas of a list": ({"alpha_pattern": [1]}, "alpha_pattern: not an object"),
    "excluded of a number": ({"exclude_modules": 2.5}, "exclude_modules: not a list of names or an expression"),
    "layers": ({"layers_to_transform": [99]}, "layers_to_transform: not layers of 0..5"),
}
TENSORS = {
    "no B": ({f"{Q}.lora_B.weight": ABSENT}, "lora_B of this module is missing"),
    "shape of A": ({f"{Q}.lora_A.weight": np.zeros((8, 99), np.float32)}, "shape [8, 99] is not [8, 256]"),
    "shape of B": ({f"{Q}.lora_B.weight": np.zeros((8, 256), np.float32)}, "shape [8, 256] is not [256, 8]"),
    "rank": ({f"{Q}.lora_A.weight": np.zeros((4, 256), np.float32)}, "shape [4, 256] is not [8, 256]"),
    "NaN": ({f"{Q}.lora_A.weight": np.full((8, 256), np.nan, np.float32)}, "NaN or infinity in float32"),
    "integers": ({f"{Q}.lora_A.weight": np.zeros((8, 256), np.int32)}, "dtype int32 is not supported"),
    "two spellings": (
        {Q.replace("model.layers", "model.language_model.layers") + ".lora_A.weight": np.zeros((8, 256), np.float32)},
        "model.layers.0.self_attn.q_proj has two such tensors",
    ),
    "no such layer": ({Q.replace(".0.", ".77.") + ".lora_A.weight": np.zeros((8, 256), np.float32)}, "no such module"),
    "head": ({"base_model.model.lm_head.lora_A.weight": np.zeros((8, 256), np.float32)}, "no such module to adapt"),
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((8, 9), np.float32)}, "embeddings"),
    "magnitude": ({f"{Q}.lora_magnitude_vector": np.zeros(256, np.float32)}, "DoRA is not supported"),
    "bias": ({f"{Q}.lora_B.bias": np.zeros(256, np.float32)}, "biases are not supported"),
    "weights": ({"model.layers.0.self_attn.q_proj.weight": np.zeros((4, 4), np.float32)}, "not a LoRA tensor"),
    "adapter's name": ({f"{Q}.lora_A.default.weight": np.zeros((8, 256), np.float32)}, "not a LoRA tensor"),
}


@pytest.fixture(scope="module")
def config():
    return ModelConfig.read(DEMO)


@pytest.fixture
def adapter(tmp_path, config):
    return write_adapter(tmp_path / "adapter", config, rank=8, targets=TARGETS)


def refusal(adapter, config) -> str:
    with pytest.raises(ModelError) as caught:
        read_adapter(adapter.folder, config, FLOAT32, 64)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_malformed_config_is_refused_by_the_field(adapter, config, name):
    changes, problem = CONFIGS[name]
    path = adapter.folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    message = refusal(adapter, config)
    assert problem in message
    assert str(adapter.folder) in message


@pytest.mark.parametrize("name", TENSORS)
def test_a_malformed_tensor_is_refused_by_name(adapter, config, name):
    changes, problem = TENSORS[name]
    tensors = {key: array for key, array in (adapter.tensors | changes).items() if array is not ABSENT}
    save(adapter.folder / "adapter_model.safetensors", tensors)
    message = refusal(adapter, config)
    assert problem in message
    assert "adapter_model.safetensors: tensor" in message


def test_files(adapter, config, tmp_path):
    tensors = adapter.folder / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-5])
    assert "the file is cut short" in refusal(adapter, config)
    write(tensors, {}, b"")
    assert "no tensors" in refusal(adapter, config)
    tensors.unlink()
    assert "adapter_model.safetensors: cannot be read" in refusal(adapter, config)
    (adapter.folder / "adapter_model.bin").write_bytes(b"\x80\x04pickle")
    assert "adapter_model.bin: pickles are not read" in refusal(adapter, config)
    (adapter.folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json: not valid JSON" in refusal(adapter, config)
    with pytest.raises(ModelError, match="no such folder"):
        read_adapter(tmp_path / "none", config, FLOAT32, 64)


def test_the_digest_is_that_of_the_content(tmp_path, config):
    def digest(name: str, **how) -> str:
        written = write_adapter(tmp_path / name, config, **{"rank": 8, "targets": TARGETS, **how})
        return read_adapter(written.folder, config, FLOAT32, 64).digest

    first = digest("one")
    assert digest("elsewhere", base_model_name_or_path="any") == first
    assert len({first, digest("two", seed=1), digest("three", alpha=17), digest("four", targets=("q_proj",))}) == 4


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", ["self_attn.q_proj", "v_proj"]])
def test_forms_of_targets(tmp_path, config, targets):
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    chosen = modules if targets == "all-linear" else TARGETS
    written = write_adapter(tmp_path, config, targets=chosen, target_modules=targets)
    read = read_adapter(written.folder, config, FLOAT32, 64)
    assert {product for _, product in read.products} == (
        {"qkv", "output", "gate_up", "down"} if targets == "all-linear" else {"qkv"}
    )
    assert set(read.products[0, "qkv"]) == ({0, 1, 2} if targets == "all-linear" else {0, 2})


def test_values_beyond_the_dtype_are_refused(adapter, config):
    adapter.tensors[f"{Q}.lora_A.weight"][0, 0] = 1e6
    save(adapter.folder / "adapter_model.safetensors", adapter.tensors)
    with pytest.raises(ModelError, match="NaN or infinity in float16"):
        read_adapter(adapter.folder, config, np.dtype(np.float16), 64)


def test_values_are_scaled_in_pieces_and_rounded_once(tmp_path, config, monkeypatch):
    monkeypatch.setattr("model.weights.lora.scaler.PIECE", 1000)
    bfloat16 = NUMPY_DTYPES["bfloat16"]
    written = write_adapter(tmp_path, config, targets=TARGETS, alpha=17, dtype=bfloat16)
    a, b = read_adapter(written.folder, config, bfloat16, 64).products[0, "qkv"][0]
    np.testing.assert_array_equal(a, written.tensors[f"{Q}.lora_A.weight"])
    scaled = written.tensors[f"{Q}.lora_B.weight"].astype(np.float32) * np.float32(17 / 8)
    np.testing.assert_array_equal(b, scaled.astype(bfloat16))


@pytest.mark.parametrize("name", ["phi3_window_fp16", "phi4_mini_longrope_bf16"])
def test_fused_modules_are_one_part(tmp_path, name):
    config = ModelConfig.read(GOLDENS / name)
    written = write_adapter(tmp_path, config, targets=("qkv_proj", "gate_up_proj"))
    read = read_adapter(written.folder, config, FLOAT32, 64)
    assert [len(b) for _, b in read.products[0, "qkv"].values()] == [
        (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    ]


def test_experts_and_routers_may_be_off(tmp_path):
    config = ModelConfig.read(GOLDENS / "qwen3_moe_dense_layer_bf16")
    written = write_adapter(tmp_path, config, targets=TARGETS)
    assert {product for _, product in read_adapter(written.folder, config, FLOAT32, 64).products} == {"qkv"}
    router = "base_model.model.model.layers.3.mlp.gate.lora_A.weight"
    save(tmp_path / "adapter_model.safetensors", {**written.tensors, router: np.zeros((8, 64), np.float32)})
    assert "adapters of experts and routers are off (--lora-experts)" in refusal(written, config)
    expert = router.replace("gate", "experts.0.gate_proj")
    save(tmp_path / "adapter_model.safetensors", {**written.tensors, expert: np.zeros((8, 64), np.float32)})
    assert "adapters of experts and routers are off (--lora-experts)" in refusal(written, config)
    assert adapts_experts(tmp_path)
    save(tmp_path / "adapter_model.safetensors", written.tensors)
    assert not adapts_experts(tmp_path)


def test_targets_may_name_experts_that_have_no_tensors(tmp_path):
    config = ModelConfig.read(GOLDENS / "qwen3_moe_dense_layer_bf16")
    every_layer = replace(config, experts=replace(config.experts, layers=(True,) * config.num_layers))
    written = write_adapter(tmp_path, every_layer, targets=TARGETS, target_modules=[*TARGETS, "gate_proj", "down_proj"])
    assert len(read_adapter(written.folder, every_layer, FLOAT32, 64).products) == config.num_layers


def test_a_wrapper_s_modules_are_found(tmp_path):
    config = ModelConfig.read(GOLDENS / "mistral3_wrapped4_sharded_bf16")
    written = write_adapter(tmp_path, config, targets=TARGETS)
    renamed = {name.replace(".model.layers", ".language_model.model.layers"): t for name, t in written.tensors.items()}
    save(tmp_path / "adapter_model.safetensors", renamed)
    assert len(read_adapter(tmp_path, config, FLOAT32, 64).products) == config.num_layers
