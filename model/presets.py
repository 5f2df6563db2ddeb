"""Model shapes by name, for measuring and planning without a model folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config import ModelConfig
from model.ops.interface import NO_WINDOW
from model.rope_config import RopeConfig


def _preset(**shape: Any) -> ModelConfig:
    return ModelConfig(windows=(NO_WINDOW,) * shape["num_layers"], dtype="bfloat16", **shape)


LLAMA31_ROPE = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    original_max_position=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": _preset(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=LLAMA31_ROPE,
        max_position=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "llama-3.2-1b": _preset(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=replace(LLAMA31_ROPE, factor=32.0),
        max_position=131072,
        tied_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "mistral-7b": _preset(
        family="mistral",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(kind="default", theta=1000000.0),
        max_position=32768,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "qwen2.5-7b": _preset(
        family="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=1000000.0),
        max_position=32768,
        qkv_bias=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
    "qwen3-8b": _preset(
        family="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=1000000.0),
        max_position=40960,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
}
