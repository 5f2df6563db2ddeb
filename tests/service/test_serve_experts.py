"""`quire serve` of a model with experts, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openai

from model.config import ModelConfig
from model.weights.checkpoint import expected_shapes
from tests.support.gateway import write_model
from tests.support.safetensors_bytes import save
from tests.support.served import Served

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
QUESTION = [{"role": "user", "content": "Which experts answer, and do they answer again? " * 3}]


def write_experts(folder: Path) -> Path:
    """Random weights of Qwen3-MoE's names, and a tokenizer."""
    raw = json.loads((write_model(folder) / "config.json").read_text())
    raw |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1], **EXPERTS}
    (folder / "config.json").write_text(json.dumps(raw))
    rng, shapes = np.random.default_rng(0), expected_shapes(ModelConfig.read(folder))
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    save(folder / "model.safetensors", tensors)
    return folder


def test_experts_answer_twice_the_same(tmp_path: Path):
    folder = str(write_experts(tmp_path / "model"))
    running = Served(tmp_path / "data", "--model", folder, "--max-model-len", "256")
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            ask = {"model": client.models.list().data[0].id, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
            first = client.chat.completions.create(**ask, extra_body={"ignore_eos": True})
            second = client.chat.completions.create(**ask, extra_body={"ignore_eos": True})  # from cached blocks
            assert first.usage.completion_tokens == 24
            assert second.choices[0].message.content == first.choices[0].message.content
    finally:
        running.terminate()
