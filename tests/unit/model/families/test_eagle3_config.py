"""A head's config.json: published layouts are read, others refused."""

import json

import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3_config import Eagle3Config, is_eagle3
from model.ops.interface import NO_WINDOW
from tests.support.demo_engine import DEMO

TARGET = ModelConfig.read(DEMO)
LAYER = json.loads((DEMO / "eagle3" / "config.json").read_text())["transformer_layer_config"]
IDS = "eagle_aux_hidden_state_layer_ids"


def speculators(layer=(), **changes):
    raw = {"speculators_model_type": "eagle3", "draft_vocab_size": 50, "transformer_layer_config": LAYER | dict(layer)}
    return raw | changes


def eagles(**changes):
    return LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50} | changes


def read(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return Eagle3Config.read(folder, TARGET)


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (speculators(**{IDS: [1, 2, 4, 6]}), {"state_layers": (1, 2, 4, 6)}),
        (eagles(**{IDS: [1, 2]}), {"state_layers": (1, 2)}),
        (eagles(eagle_config={IDS: [1, 2, 5], "use_aux_hidden_state": True}), {"state_layers": (2, 3, 6)}),
        (eagles(**{IDS: [1, 2, 4]}, rms_norm_eps=None), {"eps": 1e-6, "window": NO_WINDOW}),
        (speculators({"layer_types": ["full_attention"], "sliding_window": 7}, **{IDS: [1]}), {"window": NO_WINDOW}),
        (
            speculators({"layer_types": ["sliding_attention"], "sliding_window": 7}, norm_output=True, **{IDS: [1]}),
            {"window": 7, "norm_output": True},
        ),
        (speculators({"model_type": "qwen3"}, norm_before_fc=True, **{IDS: [1]}), {"has_qk_norms": True}),
        (speculators(draft_vocab_size=None, **{IDS: [1]}), {"draft_vocab_size": 4096}),
    ],
)
def test_published_layouts(tmp_path, raw, wanted):
    config = read(tmp_path, raw)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert is_eagle3(raw)
    assert config.shapes()["fc.weight"][1] == len(config.state_layers) * 256


def test_other_configs_are_no_heads():
    assert not is_eagle3(json.loads((DEMO / "config.json").read_text()))
    assert not is_eagle3({"speculators_model_type": "dflash", "draft_vocab_size": 50})


@pytest.mark.parametrize(
    ("raw", "refusal"),
    [
        (speculators(speculators_model_type="dflash"), r"speculators_model_type: 'dflash' is not supported .eagle3."),
        (speculators(transformer_layer_config=None), "not an EAGLE-3 head"),
        (json.loads((DEMO / "config.json").read_text()), "not an EAGLE-3 head"),
        (speculators(norm_before_fc=True, fc_norm=True), "fc_norm: not supported with norm_before_fc"),
        (speculators({"hidden_size": 128}), "hidden_size: 128 is not the model's .256."),
        (speculators(target_hidden_size=128), "target_hidden_size: 128 is not the model's"),
        (eagles(vocab_size=128256), "vocab_size: 128256 is not the model's .4096."),
        (speculators({"num_hidden_layers": 2}), r"num_hidden_layers: 2 is not supported .1."),
        (speculators({"hidden_act": "gelu"}), r"hidden_act: 'gelu' is not supported .silu."),
        (speculators({"model_type": "gpt_oss"}), r"model_type: 'gpt_oss' is not supported .llama, qwen3."),
        (speculators({"layer_types": ["chunked"]}, **{IDS: [1]}), "layer_types: .* is not supported"),
        (
            speculators({"layer_types": ["sliding_attention"], "sliding_window": None}, **{IDS: [1]}),
            "sliding_window: missing",
        ),
        (eagles(parallel_drafting=True), "parallel_drafting: not supported"),
        (eagles(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state: false is not supported"),
        (speculators({"num_key_value_heads": 3}), "do not work"),
        (speculators({"rope_parameters": {"rope_type": "spiral"}}, **{IDS: [1]}), "'spiral' is not supported"),
        (speculators(**{IDS: [1, 1, 2]}), "are not 1 to 8 of 6 layers"),
        (speculators(**{IDS: [1, 2, 7]}), "are not 1 to 8 of 6 layers"),
        (eagles(eagle_config={IDS: [1, 2, 6]}), "are not 1 to 8 of 6 layers"),
        (speculators(**{IDS: "all"}), "are not 1 to 8 of 6 layers"),
        (speculators(draft_vocab_size=5000, **{IDS: [1]}), "draft_vocab_size: 5000 is outside"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(tmp_path, raw, refusal):
    with pytest.raises(ModelError, match=refusal) as caught:
        read(tmp_path, raw)
    assert "\n" not in str(caught.value)
