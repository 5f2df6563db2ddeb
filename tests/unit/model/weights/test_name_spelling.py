"""Spellings of tensors' names."""

from __future__ import annotations

import pytest

from model.config import ModelConfig
from model.weights.name_spelling import NameSpelling, find_spelling
from tests.support.family_configs import read_family, wrapped_config

PLAIN, WRAPPED = read_family("mistral"), ModelConfig.from_dict(wrapped_config("mistral"))
NORM = "layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("config", "body", "head"),
    [
        (PLAIN, "model.", "lm_head"),
        (PLAIN, "", "lm_head"),
        (WRAPPED, "model.", "lm_head"),
        (WRAPPED, "model.language_model.", "lm_head"),
        (WRAPPED, "language_model.model.", "language_model.lm_head"),
    ],
)
def test_each_spelling_is_found_and_turned_both_ways(config: ModelConfig, body: str, head: str):
    spelling = find_spelling([f"{body}embed_tokens.weight", "other"], config)
    assert spelling.known(f"{body}{NORM}") == f"model.{NORM}"
    assert spelling.known(f"{head}.weight_scale") == "lm_head.weight_scale"
    assert spelling.stored("model.layers.0.mlp.up_proj") == f"{body}layers.0.mlp.up_proj"
    assert spelling.stored("lm_head") == head


def test_only_a_wrapper_leaves_tensors_out():
    wrapped = find_spelling(["language_model.model.embed_tokens.weight"], WRAPPED)
    assert wrapped.known("vision_tower.patch_conv.weight") is None
    assert wrapped.known("multi_modal_projector.linear_1.weight") is None
    assert find_spelling(["language_model.model.embed_tokens.weight"], PLAIN) == NameSpelling()
    assert NameSpelling().known("vision_tower.patch_conv.weight") == "vision_tower.patch_conv.weight"


def test_a_layer_named_as_in_transformers_5_is_turned_both_ways():
    mixtral = read_family("mixtral")
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
    ]
    spelling = find_spelling(names, mixtral)
    assert spelling.known(names[1]) == "model.layers.0.block_sparse_moe.gate.weight"
    assert spelling.known(names[2]) == "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    assert spelling.stored("model.layers.11.block_sparse_moe.experts.3.w3") == "model.layers.11.mlp.experts.3.up_proj"
    assert spelling.known(f"model.{NORM}") == f"model.{NORM}"
    assert find_spelling(["model.layers.0.block_sparse_moe.gate.weight"], mixtral) == NameSpelling()
