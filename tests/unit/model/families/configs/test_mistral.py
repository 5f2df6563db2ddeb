"""Mistral's families, and the wrapper of text and vision around them."""

from __future__ import annotations

from typing import Any

import pytest

from model.config import ModelConfig, text_config
from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from tests.support.family_configs import read_family, wrapped_config

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16}


def test_a_wrapper_is_its_text_model():
    config = ModelConfig.from_dict(wrapped_config("mistral", {"torch_dtype": "bfloat16"}, rope_theta=1e9))
    assert (config.family, config.is_wrapped, config.dtype, config.rope.theta) == ("mistral", True, "bfloat16", 1e9)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,)), "defaults of transformers, which files leave out"
    assert not config.tied_embeddings


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, None, True), (True, False, False), (None, True, True)])
def test_the_text_model_s_own_fields_win(outer: bool | None, inner: bool | None, tied: bool):
    raw = wrapped_config("ministral3", {"tie_word_embeddings": outer}, tie_word_embeddings=inner)
    assert ModelConfig.from_dict(raw).tied_embeddings is tied


def test_the_text_config_alone_gives_the_same_config():
    raw = wrapped_config("ministral3", {"dtype": "float16"}, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1})
    alone, whole = ModelConfig.from_dict(text_config(raw)), ModelConfig.from_dict(raw)
    assert not alone.is_wrapped
    assert {**vars(alone), "is_wrapped": True} == vars(whole)
    plain = {"model_type": "llama"}
    assert text_config(plain) is plain


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("architectures", {**wrapped_config("mistral"), "architectures": ["LlavaForConditionalGeneration"]}),
        ("text_config: missing", {"model_type": "mistral3"}),
        ("text_config: not an object", {"model_type": "mistral3", "text_config": []}),
        ("text_config: model_type", wrapped_config("mistral") | {"text_config": {"model_type": "mistral4"}}),
        ("text_config: vocab_size: missing", wrapped_config("mistral", vocab_size=None)),
    ],
)
def test_refusals_name_the_field(name: str, raw: dict[str, Any]):
    with pytest.raises(ModelError, match=name):
        ModelConfig.from_dict(raw)


def test_ministral_8b_slides_by_layer():
    kinds = ["full_attention", "sliding_attention"] * 2
    assert read_family("ministral", sliding_window=8, layer_types=kinds).windows == (NO_WINDOW, 8) * 2
    assert read_family("ministral", sliding_window=8).windows == (8,) * 4


def test_ministral_3_scales_queries():
    rope = read_family("ministral3", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}).rope
    assert (rope.kind, rope.query_beta, rope.original_max_position) == ("yarn", 0.1, 16)
    assert read_family("mistral", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}).rope.query_beta == 0
