"""Qwen3 with experts: which layers have them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from model.presets import PRESETS
from model.weights.checkpoint import expected_shapes, is_projection
from tests.support.family_configs import read_family


def layers_of(**fields: Any) -> list[int]:
    experts = read_family("qwen3_moe", **fields).experts
    assert experts is not None
    return [layer for layer, has_experts in enumerate(experts.layers) if has_experts]


def test_layers_with_experts():
    assert layers_of() == [0, 1, 2, 3]
    assert layers_of(decoder_sparse_step=2) == [1, 3]
    assert layers_of(mlp_only_layers=[0, 3], decoder_sparse_step=1) == [1, 2]


def test_fields_and_their_defaults():
    experts = read_family("qwen3_moe").experts
    assert experts is not None
    assert (experts.num_experts, experts.num_used, experts.intermediate_size) == (128, 8, 768)
    assert not experts.renormalises
    saved_by_transformers_5 = read_family("qwen3_moe", num_local_experts=16, num_experts_per_tok=4).experts
    assert saved_by_transformers_5 is not None
    assert saved_by_transformers_5.num_experts == 16


def test_every_expert_has_its_tensors_and_the_router_is_no_projection():
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = read_family("qwen3_moe", mlp_only_layers=[0], **sizes)
    shapes = expected_shapes(config)
    assert shapes["model.layers.1.mlp.experts.4.up_proj.weight"] == (24, 64)
    assert shapes["model.layers.1.mlp.experts.4.down_proj.weight"] == (64, 24)
    assert shapes["model.layers.1.mlp.gate.weight"] == (5, 64)
    assert "model.layers.1.mlp.up_proj.weight" not in shapes
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (96, 64)
    assert "model.layers.0.mlp.gate.weight" not in shapes
    assert not is_projection("model.layers.1.mlp.gate.weight")


def test_parameters_of_the_published_shape():
    config = PRESETS["qwen3-30b-a3b"]
    assert config.num_parameters == 30_531_911_680  # 30.5 B with norms
    assert config.num_active_parameters == 3_352_821_760  # 3.3 B
    small = sum(size for size, *rest in expected_shapes(config).values() if not rest)
    assert sum(size * (rest[0] if rest else 1) for size, *rest in expected_shapes(config).values()) == (
        config.num_parameters + small
    )


def test_every_layer_slides_or_none():
    assert set(read_family("qwen3_moe", sliding_window=16).windows) == {NO_WINDOW}
    assert set(read_family("qwen3_moe", sliding_window=16, use_sliding_window=True).windows) == {16}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("num_experts", {"num_experts": 0}),
        ("num_experts_per_tok", {"num_experts": 4, "num_experts_per_tok": 5}),
        ("moe_intermediate_size", {"moe_intermediate_size": 0}),
        ("norm_topk_prob", {"norm_topk_prob": 1}),
        ("decoder_sparse_step", {"decoder_sparse_step": 0}),
        ("mlp_only_layers", {"mlp_only_layers": [True]}),
        ("mlp_only_layers", {"mlp_only_layers": 3}),
        ("shared_expert_intermediate_size: shared experts", {"shared_expert_intermediate_size": 512}),
        ("n_shared_experts: shared experts", {"n_shared_experts": 1}),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, changes: dict[str, Any]):
    with pytest.raises(ModelError, match=name):
        read_family("qwen3_moe", **changes)
