"""Every family is read, has a golden, and refuses what it does not know."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from model.errors import ModelError
from model.families.configs.registry import FAMILIES, TWISTS
from tests.support.family_configs import family_config, read_family
from tests.support.goldens import FOLDER, NAMES

VALUES = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=4)


def test_every_family_has_a_golden():
    assert {ModelConfig.read(FOLDER / name).family for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_architecture_is_refused(family: str):
    assert read_family(family).family == family
    with pytest.raises(ModelError, match=rf"architectures: .*BertModel.*known: {FAMILIES[family].architecture}"):
        read_family(family, architectures=["BertModel"])
    with pytest.raises(ModelError, match="hidden_act: 'gelu' is not supported"):
        read_family(family, hidden_act="gelu")


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"model_type: 'bert' is not supported \(known: llama, .*mixtral, mistral3\)"):
        ModelConfig.from_dict({**family_config("llama"), "model_type": "bert"})


def test_a_known_family_that_is_not_served_is_refused_with_its_twist():
    assert not TWISTS.keys() & FAMILIES.keys()
    with pytest.raises(ModelError, match=r"'arcee' is not supported: it has an MLP without a gate \(known: llama, "):
        ModelConfig.from_dict({**family_config("llama"), "model_type": "arcee"})


FIELDS = (
    *("no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window", "use_sliding_window"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("num_experts", "num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"),
    *("partial_rotary_factor", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(
        st.sampled_from(FIELDS),
        VALUES | st.lists(VALUES, max_size=4) | st.dictionaries(st.sampled_from(["rope_type", "type"]), VALUES),
        max_size=3,
    ),
)
def test_no_config_does_anything_but_read_or_refuse(family: str, changes: dict[str, Any]):
    with suppress(ModelError):
        config = read_family(family, **changes)
        assert len(config.windows) == len(config.ropes) == config.num_layers
