"""Small random models of published architectures, in a cache laid out as the hub's client lays it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.weights.checkpoint import expected_shapes
from model.weights.safetensors_file import FLOAT_DTYPES
from tests.support.hub import COMMIT
from tests.support.safetensors_bytes import save
from tests.support.source_tree import ROOT

DEMO = ROOT / "model" / "demo"
TEMPLATES = ROOT / "tests" / "unit" / "model" / "text" / "templates"
SHAPE = {
    "vocab_size": 4096,  # the demo's tokenizer
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000.0}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
MISTRAL3 = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {**SHAPE, "model_type": "mistral", "rope_theta": 1000000000.0},
    "torch_dtype": "bfloat16",
}
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA, "llama3"),
    "meta-llama/Llama-3.2-3B-Instruct": ({**LLAMA, "tie_word_embeddings": True}, "llama3"),
    "meta-llama/Llama-3.3-70B-Instruct": (LLAMA, "llama3"),
    "Qwen/Qwen2.5-7B-Instruct": ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "qwen2_5"),
    "Qwen/Qwen3-8B": (QWEN3, "qwen3"),
    "Qwen/Qwen3-30B-A3B": (QWEN3_MOE, "qwen3"),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
        "mistral_calls",
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (MISTRAL3, "mistral_calls"),
}
"""Fields of the published config.json, and the chat template."""


def write_cached(hub: Path, name: str) -> Path:
    """Write one of MODELS into the hub's cache `hub`, with random weights; return its folder."""
    fields, template = MODELS[name]
    repository = hub / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    is_wrapped = "text_config" in fields
    (folder / "config.json").write_text(json.dumps(fields if is_wrapped else {**SHAPE, **fields}))
    random = np.random.default_rng(0)
    tensors = {}
    for tensor, shape in expected_shapes(ModelConfig.read(folder)).items():
        values = np.ones(shape, np.float32) if len(shape) == 1 else random.standard_normal(shape, np.float32) * 0.05
        tensors[f"language_model.{tensor}" if is_wrapped else tensor] = values.astype(FLOAT_DTYPES["BF16"])
    save(folder / "model.safetensors", tensors)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / file, folder)
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return folder
