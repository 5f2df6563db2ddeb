"""Llama's checkpoints, with the fields that fine-tunes of it carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.presets import PRESETS
from tests.support.family_configs import family_config, read_family

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_llama_33_and_r1_s_distill_are_llama_31():
    whole = PRESETS["llama-3.1-8b"]
    raw = family_config(
        "llama",
        vocab_size=whole.vocab_size,
        hidden_size=whole.hidden_size,
        intermediate_size=whole.intermediate_size,
        num_hidden_layers=whole.num_layers,
        num_attention_heads=whole.num_heads,
        num_key_value_heads=whole.num_kv_heads,
        max_position_embeddings=whole.max_position,
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        pretraining_tp=1,
        rope_scaling=LLAMA3,
        rope_theta=500000.0,
        torch_dtype="bfloat16",
        bos_token_id=128000,
        eos_token_id=128001,
    )
    assert ModelConfig.from_dict(raw) == replace(whole, eos_token_ids=(128001,))
    assert PRESETS["llama-3.3-70b"].num_parameters == 70_552_387_584
    assert PRESETS["llama-3.3-70b"].rope == whole.rope


def test_iquest_coder_is_llama_by_either_name():
    config = read_family("iquestcoder", clip_qkv=None, use_sliding_window=False)
    assert config == read_family("iquestcoder", architectures=["LlamaForCausalLM"])
    assert replace(config, family="llama") == read_family("llama", head_dim=128)


@pytest.mark.parametrize("fields", [{"clip_qkv": 8.0}, {"use_sliding_window": True}])
def test_what_no_iquest_coder_has_is_refused(fields: dict[str, object]):
    with pytest.raises(ModelError, match=f"{next(iter(fields))}: is not supported"):
        read_family("iquestcoder", **fields)
