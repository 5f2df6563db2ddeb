"""GGUF of every architecture that is read: the same weights as the folder of safetensors that it is made from."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Llama
from model.gguf_config import ARCHITECTURES
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from model.weights.safetensors_file import read_safetensors
from tests.support.gguf_bytes import save_gguf
from tests.support.goldens import FOLDER

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
METADATA = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
PAIRED = {"llama", "granite", "smollm3"}


def paired(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Row 2 i + p of a head is row p * D / 2 + i of a rotation in halves."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write(folder: Path, golden: str, architecture: str, style: str = "stacked", num_parts: int = 1) -> None:
    """Write a golden as one .gguf or parts of one, experts "stacked", "fused" (gate and up) or "single"."""
    source = FOLDER / golden
    raw: dict[str, Any] = json.loads((source / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in read_safetensors(source / "model.safetensors").items():
        found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", name)
        assert found is not None
        prefix, values = "" if found[1] is None else f"blk.{found[1]}.", tensor.values()
        if (expert := EXPERT.fullmatch(found[2])) is not None:
            experts.setdefault(f"{prefix}ffn_{PARTS[expert[2]]}", {})[int(expert[1])] = values
            continue
        if architecture in PAIRED and found[2].endswith(("q_proj", "k_proj")):
            values = paired(values, raw["head_dim"])
        tensors[f"{prefix}{NAMES[found[2]]}.{found[3]}"] = values.astype(np.float32)
    for stem, parts in experts.items():
        ordered = [parts[index].astype(np.float32) for index in range(len(parts))]
        if style == "single":
            tensors |= {f"{stem}.{index}.weight": matrix for index, matrix in enumerate(ordered)}
        else:
            tensors[f"{stem}_exps.weight"] = np.stack(ordered)
    if style == "fused":
        for gate in [name for name in tensors if "ffn_gate_exps" in name]:
            up = tensors.pop(gate.replace("gate", "up"))
            tensors[gate.replace("gate", "gate_up")] = np.concatenate([tensors.pop(gate), up], axis=1)
    metadata = {f"{architecture}.{key}": raw[field] for key, field in METADATA.items() if raw.get(field) is not None}
    if experts:
        metadata[f"{architecture}.expert_count"] = raw.get("num_local_experts") or raw["num_experts"]
    ids = {f"tokenizer.ggml.{key}": raw[key] for key in ("bos_token_id", "eos_token_id") if key in raw}
    metadata = {"general.architecture": architecture, **metadata, **ids}
    if num_parts == 1:
        save_gguf(folder / "model.gguf", metadata, tensors)
    for part in range(num_parts if num_parts > 1 else 0):
        own = {name: tensors[name] for name in sorted(tensors)[part::num_parts]}
        split = {"split.no": part, "split.count": num_parts, "split.tensors.count": len(tensors)}
        save_gguf(folder / part_name(part, num_parts), (metadata if part == 0 else {}) | split, own)


def part_name(part: int, num_parts: int) -> str:
    return f"model-{part + 1:05}-of-{num_parts:05}.gguf"


def load(folder: Path) -> Llama:
    return load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)


def assert_same(model: Llama, expected: Llama) -> None:
    np.testing.assert_array_equal(model.weights.lm_head.data, expected.weights.lm_head.data)
    for layer, wanted in zip(model.weights.layers, expected.weights.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down", *(("router",) if wanted.router is not None else ())):
            np.testing.assert_array_equal(getattr(layer, name).data, getattr(wanted, name).data)


@pytest.mark.parametrize(
    ("golden", "architecture"),
    [
        ("llama3_gqa_bf16", "llama"),
        ("mistral_window_bf16", "llama"),
        ("ministral_layer_types_bf16", "llama"),
        ("mixtral_bf16", "llama"),
        ("qwen2_bf16", "qwen2"),
        ("qwen3_bf16", "qwen3"),
        ("qwen3_moe_bf16", "qwen3moe"),
        ("qwen3_moe_dense_layer_bf16", "qwen3moe"),
        ("granite_tied_bf16", "granite"),
        ("smollm3_tied_bf16", "smollm3"),
        ("ernie4_5_tied_bf16", "ernie4_5"),
    ],
)
def test_a_gguf_file_in_a_model_folder_holds_its_weights(tmp_path: Path, golden: str, architecture: str):
    write(tmp_path, golden, architecture)
    shutil.copy(FOLDER / golden / "config.json", tmp_path)
    assert_same(load(tmp_path), load(FOLDER / golden))


@pytest.mark.parametrize("style", ["stacked", "fused", "single"])
@pytest.mark.parametrize(("golden", "architecture"), [("qwen3_moe_bf16", "qwen3moe"), ("mixtral_bf16", "llama")])
def test_experts_without_a_config(tmp_path: Path, golden: str, architecture: str, style: str):
    write(tmp_path, golden, architecture, style)
    config, expected = ModelConfig.read(tmp_path), ModelConfig.read(FOLDER / golden)
    rope = replace(config.rope, theta=expected.rope.theta)  # float32 in the file
    eps = pytest.approx(expected.rms_norm_eps)
    assert config.rms_norm_eps == eps
    assert config.rope.theta == pytest.approx(expected.rope.theta)
    assert replace(config, rope=rope, rms_norm_eps=expected.rms_norm_eps) == expected
    assert_same(load(tmp_path), load(FOLDER / golden))


@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.needs_config])
def test_metadata_that_do_not_suffice_ask_for_the_config(tmp_path: Path, architecture: str):
    write(tmp_path, "llama3_gqa_bf16", architecture)
    with pytest.raises(ModelError, match=f"architecture: '{architecture}' needs the original config.json next to it"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("golden", "architecture", "problem"),
    [
        ("llama3_gqa_bf16", "qwen2", r"'qwen2' does not hold config.json's 'llama' \(qwen2\)"),
        ("granite_tied_bf16", "llama", "'llama' does not hold config.json's 'granite'"),
        ("llama3_gqa_bf16", "phi3", r"'phi3' is not supported \(llama, qwen2, qwen3, qwen3moe, "),
    ],
)
def test_a_config_of_another_architecture_is_refused(tmp_path: Path, golden: str, architecture: str, problem: str):
    write(tmp_path, golden, architecture)
    shutil.copy(FOLDER / golden / "config.json", tmp_path)
    with pytest.raises(ModelError, match=f"general.architecture: {problem}"):
        load(tmp_path)


def test_stacks_of_another_shape_are_refused(tmp_path: Path):
    write(tmp_path, "qwen3_moe_bf16", "qwen3moe")
    config = ModelConfig.read(tmp_path)
    assert config.experts is not None
    fewer = replace(config, experts=replace(config.experts, num_experts=4))
    with pytest.raises(ModelError, match=r"shape \[8, 64, 32\] is not that of 4 matrices"):
        load_model(tmp_path, fewer, NumpyOps(), 16)


def test_parts_of_one_file(tmp_path: Path):
    write(tmp_path, "qwen3_moe_bf16", "qwen3moe", num_parts=3)
    assert_same(load(tmp_path), load(FOLDER / "qwen3_moe_bf16"))
    first, second = (tmp_path / part_name(part, 3) for part in (0, 1))
    data = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: tensor .*: is in another part too"):
        load(tmp_path)
    second.write_bytes(data[:-1])
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: tensor .*: ends beyond the file"):
        load(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=r"2 \.gguf files are there \(1, or all parts of one\)"):
        load(tmp_path)
    (tmp_path / part_name(2, 3)).unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: cannot be read"):
        load(tmp_path)
    first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"split\.count: 3 parts, but the name is not NAME-00001-of-00002\.gguf"):
        load(tmp_path)
