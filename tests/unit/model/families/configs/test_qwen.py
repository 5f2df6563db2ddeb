"""Qwen's checkpoints: R1's distills, embedding and reranker models."""

from __future__ import annotations

from model.ops.interface import NO_WINDOW
from tests.support.family_configs import read_family


def test_r1_s_distills_name_a_window_that_they_do_not_use():
    config = read_family(
        "qwen2", sliding_window=4096, use_sliding_window=False, max_window_layers=2, use_mrope=False, eos_token_id=7
    )
    assert config.windows == (NO_WINDOW,) * 4
    assert (config.qkv_bias, config.output_bias, config.eos_token_ids) == (True, False, (7,))


def test_r1_0528_s_distill_stretches_qwen3():
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attn_factor": 0.8782488562869419,
    }
    config = read_family("qwen3", rope_scaling=scaling, rope_theta=1000000)
    assert (config.rope.kind, config.max_position, config.rope.attention_factor) == ("yarn", 256, None)


def test_the_embedding_and_reranker_models_are_qwen3_with_one_matrix_of_tokens():
    config = read_family("qwen3", tie_word_embeddings=True, max_window_layers=4, use_sliding_window=False)
    assert config.shares_embedding
    assert (config.qk_norm, config.head_dim) == (True, 128)


def test_windows_by_layer():
    assert read_family("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3).windows == (
        *(NO_WINDOW,) * 3,
        8,
    )
