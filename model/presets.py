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


def _published(family: str, sizes: tuple[int, ...], **more: Any) -> ModelConfig:
    """Return a config, given (vocabulary, hidden, intermediate, layers, heads, KV heads) and fields of config.json."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    shape = zip((*names, "num_attention_heads", "num_key_value_heads"), sizes, strict=True)
    return ModelConfig.from_dict(
        {"model_type": family, "rms_norm_eps": 1e-5, "dtype": "bfloat16", **dict(shape), **more}
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
    "llama-3.3-70b": _preset(
        family="llama",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=LLAMA31_ROPE,
        max_position=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "mistral-small-3.2-24b": _published(
        "mistral",
        (131072, 5120, 32768, 40, 32, 8),
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=1e9,
        eos_token_id=2,
    ),
    "ministral-3-8b": _published(
        "ministral3",
        (131072, 4096, 14336, 34, 32, 8),
        head_dim=128,
        max_position_embeddings=262144,
        eos_token_id=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "smollm3-3b": _published(
        "smollm3",
        (128256, 2048, 11008, 36, 16, 4),
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        tie_word_embeddings=True,
        eos_token_id=128012,
    ),
    "granite-3.3-2b": _published(
        "granite",
        (49159, 2048, 8192, 40, 32, 8),
        max_position_embeddings=131072,
        rope_theta=1e7,
        tie_word_embeddings=True,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        eos_token_id=0,
    ),
    "phi-4": _published(
        "phi3",
        (100352, 5120, 17920, 40, 40, 10),
        max_position_embeddings=16384,
        rope_theta=250000.0,
        eos_token_id=100265,
    ),
    "olmo-3-7b": _published(
        "olmo3",
        (100278, 4096, 11008, 32, 32, 32),
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
        },
        sliding_window=4096,
        eos_token_id=100257,
    ),
    "qwen3-30b-a3b": _published(
        "qwen3_moe",
        (151936, 2048, 6144, 48, 32, 4),
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        bos_token_id=151643,
        eos_token_id=[151645, 151643],
    ),
    "mixtral-8x7b": _published(
        "mixtral",
        (32000, 4096, 14336, 32, 32, 8),
        max_position_embeddings=32768,
        rope_theta=1e6,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
