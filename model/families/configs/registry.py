"""Every family, by the `model_type` of config.json."""

from __future__ import annotations

from model.families.configs.family import Family
from model.families.configs.granite import GRANITE
from model.families.configs.llama import LLAMA
from model.families.configs.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from model.families.configs.mixtral import MIXTRAL
from model.families.configs.olmo import OLMO2, OLMO3
from model.families.configs.phi3 import PHI3
from model.families.configs.qwen import QWEN2, QWEN3
from model.families.configs.qwen3_moe import QWEN3_MOE
from model.families.configs.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3),
        *(SMOLLM3, GRANITE, PHI3, OLMO2, OLMO3),
        *(QWEN3_MOE, MIXTRAL),
    )
}
