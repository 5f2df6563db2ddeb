"""config.json and generation_config.json: both spellings read alike, everything else refused by name in one line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import ModelConfig, RopeConfig, generation_defaults
from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from model.presets import PRESETS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}


def qwen(**changes: Any) -> dict[str, Any]:
    raw = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, **changes}
    return {name: value for name, value in raw.items() if name != "rope_scaling"}


def test_llama31_is_its_preset():
    assert ModelConfig.from_dict(LLAMA) == PRESETS["llama-3.1-8b"]
    assert PRESETS["llama-3.1-8b"].num_parameters == 8_029_995_008


def test_both_spellings_read_alike():
    new = {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["dtype"] = "bfloat16"
    new["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(LLAMA)


def test_presets_are_whole():
    for name, config in PRESETS.items():
        assert len(config.windows) == config.num_layers, name
        assert config.num_heads % config.num_kv_heads == 0
        assert all(token_id < config.vocab_size for token_id in config.eos_token_ids)


def test_what_llama2_leaves_out():
    raw = {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    del raw["num_key_value_heads"], raw["tie_word_embeddings"], raw["hidden_act"], raw["architectures"]
    config = ModelConfig.from_dict({**raw, "eos_token_id": 2})
    assert (config.num_kv_heads, config.head_dim, config.dtype, config.tied_embeddings) == (32, 128, "float32", False)
    assert config.rope == RopeConfig(kind="default", theta=10000.0)
    assert config.eos_token_ids == (2,)


def test_biases_by_family():
    assert not ModelConfig.from_dict(LLAMA).qkv_bias
    llama = ModelConfig.from_dict({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = ModelConfig.from_dict(qwen())
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = ModelConfig.from_dict(qwen(model_type="qwen3", architectures=["Qwen3ForCausalLM"]))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({**LLAMA, "sliding_window": 64}, (NO_WINDOW,) * 32),
        ({**LLAMA, "model_type": "mistral", "architectures": None, "sliding_window": 4096}, (4096,) * 32),
        ({**LLAMA, "model_type": "mistral", "architectures": None, "sliding_window": None}, (NO_WINDOW,) * 32),
        (qwen(sliding_window=64, max_window_layers=1), (NO_WINDOW,) * 4),
        (qwen(use_sliding_window=True, sliding_window=64, max_window_layers=3), (NO_WINDOW,) * 3 + (64,)),
        (
            qwen(
                use_sliding_window=True,
                sliding_window=64,
                layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            ),
            (64, NO_WINDOW, NO_WINDOW, 64),
        ),
    ],
)
def test_windows(raw: dict[str, Any], windows: tuple[int, ...]):
    assert ModelConfig.from_dict(raw).windows == windows


@pytest.mark.parametrize(
    ("scaling", "kind", "max_position"),
    [
        (None, "default", 131072),
        ({"rope_type": "default"}, "default", 131072),
        ({"type": "linear", "factor": 2}, "linear", 262144),
        ({"type": "dynamic", "factor": 4.0}, "dynamic", 524288),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "yarn", 131072),
        ({"type": "yarn", "original_max_position_embeddings": 32768}, "yarn", 131072),
    ],
)
def test_rope_kinds_and_the_length_they_reach(scaling: dict[str, Any] | None, kind: str, max_position: int):
    config = ModelConfig.from_dict({**LLAMA, "rope_scaling": scaling})
    assert (config.rope.kind, config.max_position, config.rope.theta) == (kind, max_position, 500000.0)


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("model_type", {"model_type": "dbrx"}),
    ("model_type", {"model_type": None}),
    ("model_type", {"model_type": ["llama"]}),
    ("architectures", {"architectures": ["LlamaForSequenceClassification"]}),
    ("architectures", {"architectures": "LlamaForCausalLM"}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("vocab_size", {"vocab_size": None}),
    ("vocab_size", {"vocab_size": "32000"}),
    ("vocab_size", {"vocab_size": True}),
    ("vocab_size", {"vocab_size": 32000.0}),
    ("hidden_size", {"hidden_size": -4096}),
    ("hidden_size", {"hidden_size": 1 << 40}),
    ("hidden_size", {"hidden_size": 4097}),
    ("intermediate_size", {"intermediate_size": 0}),
    ("num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("num_attention_heads", {"num_key_value_heads": 5}),
    ("num_key_value_heads", {"num_key_value_heads": 0}),
    ("head_dim", {"head_dim": 127}),
    ("head_dim", {"head_dim": 1 << 20}),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("rms_norm_eps", {"rms_norm_eps": float("inf")}),
    ("rms_norm_eps", {"rms_norm_eps": 0}),
    ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
    ("max_position_embeddings", {"max_position_embeddings": 1 << 50}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("torch_dtype", {"torch_dtype": "float8_e4m3fn"}),
    ("dtype", {"dtype": "int8"}),
    ("eos_token_id", {"eos_token_id": -1}),
    ("eos_token_id", {"eos_token_id": [2, "3"]}),
    ("eos_token_id", {"eos_token_id": {"id": 2}}),
    ("rope_theta", {"rope_theta": -1.0}),
    ("rope_theta", {"rope_theta": "10000"}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("rope_scaling", {"rope_scaling": [1]}),
    ("rope_type", {"rope_scaling": {"rope_type": "longrope"}}),
    ("rope_type", {"rope_scaling": {"type": "su"}}),
    ("rope_scaling: type", {"rope_scaling": {"type": 3}}),
    ("factor", {"rope_scaling": {"type": "linear"}}),
    ("factor", {"rope_scaling": {"type": "linear", "factor": 0.5}}),
    ("low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
    (
        "high_freq_factor",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 1}},
    ),
    ("beta_fast", {"rope_scaling": {**YARN, "beta_fast": 0.5}}),
    ("attention_factor", {"rope_scaling": {**YARN, "attention_factor": float("inf")}}),
    ("truncate", {"rope_scaling": {**YARN, "truncate": 1}}),
    ("per layer type", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("layer_types", {"layer_types": ["full_attention"]}),
    ("layer_types", {"layer_types": ["full_attention", "sliding_attention"] * 16}),
]


@pytest.mark.parametrize(("name", "changes"), REFUSED)
def test_refusals_name_the_field(name: str, changes: dict[str, Any]):
    with pytest.raises(ModelError, match=name) as refusal:
        ModelConfig.from_dict({**LLAMA, **changes}, "folder/config.json")
    assert str(refusal.value).startswith("folder/config.json: ")
    assert "\n" not in str(refusal.value)


@given(
    st.dictionaries(
        st.sampled_from([*LLAMA, "rope_parameters", "layer_types", "head_dim", "dtype", "generation"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_no_config_does_anything_but_read_or_refuse(changes: dict[str, Any]):
    with suppress(ModelError):
        config = ModelConfig.from_dict({**LLAMA, **changes})
        assert len(config.windows) == config.num_layers


def test_generation_config_adds_eos_ids(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 128001}))
    assert ModelConfig.read(tmp_path).eos_token_ids == (128001,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128009, 128001]}')
    assert ModelConfig.read(tmp_path).eos_token_ids == (128001, 128009)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "larger than"),
        ('{"vocab_size": 1' + "0" * 5000 + "}", "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
    ids=["empty", "open", "list", "nan", "twice", "deep", "large", "digits", "utf8"],
)
def test_broken_files(tmp_path: Path, text: str, problem: str):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=problem) as refusal:
        ModelConfig.read(tmp_path)
    assert "config.json" in str(refusal.value)


def test_a_missing_folder_is_one_line(tmp_path: Path):
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        ModelConfig.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("written", "defaults"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
        ({"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"repetition_penalty": 1}, {"repetition_penalty": 1.0}),
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {}),
    ],
)
def test_generation_defaults(tmp_path: Path, written: dict[str, Any] | None, defaults: dict[str, Any]):
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert generation_defaults(tmp_path) == defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("do_sample", "no"),
    ],
)
def test_generation_refusals(tmp_path: Path, name: str, value: Any):
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name}"):
        generation_defaults(tmp_path)
