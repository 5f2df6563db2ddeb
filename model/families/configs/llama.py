"""Llama 2 to 3.3, and DeepSeek-R1's distills into it."""

from __future__ import annotations

from model.families.configs.family import Family

LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", reads_mlp_bias=True)
