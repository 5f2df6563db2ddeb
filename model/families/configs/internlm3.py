"""InternLM 3: Llama whose biases are set by `qkv_bias` and `bias`, transformers' `attention_bias` and `mlp_bias`."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Biases, Family


def _biases(fields: Fields) -> Biases:
    own, others = "qkv_bias", "bias"
    if "qkv_bias" not in fields.raw and "bias" not in fields.raw:
        own, others = "attention_bias", "mlp_bias"
    has_others = fields.boolean(others, False)
    return Biases(qkv=fields.boolean(own, False), output=has_others, mlp=has_others)


INTERNLM3 = Family(
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    saved_as="LlamaForCausalLM",
    biases=_biases,
    default_head_dim=128,
)
