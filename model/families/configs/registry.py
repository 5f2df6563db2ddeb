"""All families, by the `model_type` of config.json."""

from __future__ import annotations

from model.families.configs.cwm import CWM
from model.families.configs.ernie4_5 import ERNIE4_5
from model.families.configs.exaone4 import EXAONE4
from model.families.configs.family import Family
from model.families.configs.glm import GLM
from model.families.configs.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from model.families.configs.helium import HELIUM
from model.families.configs.internlm3 import INTERNLM3
from model.families.configs.llama import IQUESTCODER, LLAMA
from model.families.configs.mellum import MELLUM
from model.families.configs.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from model.families.configs.mixtral import MIXTRAL
from model.families.configs.olmo import OLMO2, OLMO3, OLMOE
from model.families.configs.phi3 import PHI3
from model.families.configs.qwen import QWEN2, QWEN3
from model.families.configs.qwen3_moe import QWEN3_MOE
from model.families.configs.seed_oss import SEED_OSS
from model.families.configs.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3),
        *(SMOLLM3, GRANITE, PHI3, OLMO2, OLMO3),
        *(SEED_OSS, EXAONE4, GLM, ERNIE4_5, CWM, HELIUM, INTERNLM3, IQUESTCODER, GRANITE_HYBRID),
        *(QWEN3_MOE, MELLUM, OLMOE, GRANITE_MOE, MIXTRAL),
    )
}

TWISTS: dict[str, str] = {
    model_type: twist
    for twist, model_types in {
        "norms before and after attention and MLP": ("gemma2", "gemma3", "gemma3_text", "glm4", "hyperclovax"),
        "norms of 1 plus their weight": ("gemma",),
        "attention and MLP side by side": ("cohere", "cohere2", "falcon", "gpt_neox", "phi"),
        "LayerNorm with a mean": ("gpt2", "nemotron", "olmo", "stablelm", "starcoder2"),
        "an MLP without a gate": ("apertus", "arcee", "jais2", "nanochat"),
        "norms of q and k after their rotation": ("hunyuan_v1_dense",),
        "attention sinks": ("gpt_oss", "granite_swa"),
        "latent attention": ("deepseek_v2", "deepseek_v3", "minicpm3"),
        "experts that are not served": (
            *("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "granitemoeshared", "hunyuan_v1_moe"),
            *("llama4", "minimax_m2", "phimoe", "qwen2_moe"),
        ),
        "code that transformers does not have": ("minicpm",),
        "layers without attention": ("falcon_h1", "jamba", "lfm2", "nemotron_h", "qwen3_next"),
        "tensors of a form of its own": ("baichuan", "chatglm", "exaone", "internlm2", "qwen"),
    }.items()
    for model_type in model_types
}
"""Differences of unsupported models, by `model_type`."""
