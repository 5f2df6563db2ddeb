"""Llama 2 to 3.3, and DeepSeek-R1's distills into it."""

from __future__ import annotations

from model.families.configs.family import Family, llama_biases

LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", biases=llama_biases)
