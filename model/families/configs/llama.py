"""Llama 2 to 3.3, DeepSeek-R1's distills into it, and IQuest-Coder."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Biases, Family, llama_biases


def _iquestcoder_biases(fields: Fields) -> Biases:
    for name in ("clip_qkv", "use_sliding_window"):
        if fields.get(name):
            raise fields.error(name, "is not supported (null)")
    return llama_biases(fields)


LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", biases=llama_biases)
IQUESTCODER = Family(
    model_type="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    saved_as="LlamaForCausalLM",
    biases=_iquestcoder_biases,
    default_head_dim=128,
)
