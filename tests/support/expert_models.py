"""A small model with experts and dummy weights, large enough for every kernel of experts."""

from __future__ import annotations

import json
from pathlib import Path

from model.config import ModelConfig
from model.families.llama import Llama
from model.ops.interface import Ops
from model.weights.loader import load_model

MAX_LEN = 256

FIELDS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


def write_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FIELDS))
    return folder


def expert_model(folder: Path, ops: Ops, quantization: str = "auto") -> Llama:
    config = ModelConfig.read(write_config(folder))
    return load_model(None, config, ops, MAX_LEN, load_format="dummy", quantization=quantization)
