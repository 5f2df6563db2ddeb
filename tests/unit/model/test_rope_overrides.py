"""Overrides of the rotary embedding: the same as config.json edited, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.rope_config import first_unknown
from tests.support.small_models import MISTRAL3, QWEN3, SHAPE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
FOUR = {**SHAPE, **QWEN3}
FIVE = {**{key: value for key, value in FOUR.items() if key != "rope_theta"},
        "rope_parameters": {"rope_type": "default", "rope_theta": QWEN3["rope_theta"]}}  # fmt: skip
STRETCHED = {**FOUR, "rope_scaling": YARN}


def read(folder, config, overrides=None):
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.read(folder, overrides)


@pytest.mark.parametrize("config", [FOUR, FIVE, STRETCHED])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_a_section_is_replaced_and_keeps_its_theta(tmp_path, config, section):
    found = read(tmp_path, config, {section: YARN})
    assert found == read(tmp_path, STRETCHED)
    assert found.max_position == 4 * 32768
    assert found.rope.theta == QWEN3["rope_theta"]


@pytest.mark.parametrize("config", [FOUR, FIVE])
def test_theta_and_length(tmp_path, config):
    plain = read(tmp_path, config)
    found = read(tmp_path, config, {"rope_theta": 5e6, "max_position_embeddings": 70000})
    assert found == replace(plain, rope=replace(plain.rope, theta=5e6), max_position=70000)
    assert read(tmp_path, config, {}) == plain


@pytest.mark.parametrize("overrides", [{"rope_theta": 5e6}, {"text_config": {"rope_theta": 5e6}}])
def test_the_language_model_of_a_wrapper(tmp_path, overrides):
    edited = {**MISTRAL3, "text_config": {**MISTRAL3["text_config"], "rope_theta": 5e6}}
    assert read(tmp_path, MISTRAL3, overrides) == read(tmp_path, edited)


@pytest.mark.parametrize(
    ("config", "overrides", "complaint"),
    [
        (FOUR, {"text_config": {"rope_theta": 5e6}}, "text_config: config.json has none"),
        ({**FOUR, "rope_parameters": {"full_attention": YARN}}, {"rope_scaling": YARN}, "differs by layer type"),
        (FOUR, {"rope_scaling": {"rope_type": "magic"}}, "'magic' is not supported"),
    ],
)
def test_one_line(tmp_path, config, overrides, complaint):
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, config, overrides)


@pytest.mark.parametrize(
    ("overrides", "unknown"),
    [
        ({"rope_scaling": {}, "text_config": {"rope_theta": 1}}, None),
        ({"architectures": []}, "architectures"),
        ({"text_config": {"hidden_size": 1}}, "text_config.hidden_size"),
        ({"text_config": 1}, "text_config"),
    ],
)
def test_other_fields(overrides, unknown):
    assert first_unknown(overrides) == unknown
