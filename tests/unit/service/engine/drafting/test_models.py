import json
from dataclasses import replace
from pathlib import Path

import pytest

from model.config import ModelConfig
from model.ops.cpu.ops import NumpyOps
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.drafting.models import plan_draft_model
from service.errors import StartupError
from tests.support.demo_engine import DEMO

OPS = NumpyOps()
CONFIG = ModelConfig.read(DEMO)
EAGLE3 = SpeculativeConfig(method="eagle3")
SETTINGS = Settings(model=DEMO, device="cpu", speculative_config=EAGLE3)


def test_a_head_lies_in_the_models_folder_unless_it_is_named():
    found = plan_draft_model(SETTINGS, CONFIG, OPS)
    assert found.folder == DEMO / "eagle3"
    assert found.block_shape(16) == (1, 2, 2, 16, 64)
    named = replace(SETTINGS, speculative_config=replace(EAGLE3, model=DEMO / "eagle3"))
    assert plan_draft_model(replace(named, model=Path("elsewhere")), CONFIG, OPS) == found


def test_other_settings_name_no_head():
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    for wanted in (None, ngram):
        assert plan_draft_model(replace(SETTINGS, speculative_config=wanted), CONFIG, OPS) is None
    assert plan_draft_model(SETTINGS, replace(CONFIG, has_head=False), OPS) is None


@pytest.mark.parametrize(
    ("model", "refusal"),
    [(DEMO / "nowhere", "nowhere: no such folder"), (DEMO, "not an EAGLE-3 head")],
)
def test_a_wrong_folder_is_refused_under_the_flags_name(model, refusal):
    with pytest.raises(StartupError, match=rf"^--speculative-config: .*{refusal}"):
        plan_draft_model(replace(SETTINGS, speculative_config=replace(EAGLE3, model=model)), CONFIG, OPS)


def test_a_draft_model_has_the_models_vocabulary(tmp_path):
    settings = replace(SETTINGS, speculative_config=SpeculativeConfig(method="draft_model", model=DEMO))
    found = plan_draft_model(settings, CONFIG, OPS)
    assert found.block_shape(16) == (6, 2, 2, 16, 64)
    assert found.num_bytes > 10_000_000
    for name in ("config.json", "tokenizer_config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(DEMO / name)
    changed = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (4000, 4001)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    other = replace(settings, speculative_config=replace(settings.speculative_config, model=tmp_path))
    with pytest.raises(StartupError, match=r"^--speculative-config: .*: 2 of 4096 tokens differ from the model's"):
        plan_draft_model(other, CONFIG, OPS)
    with pytest.raises(StartupError, match="draft_model needs a model folder"):
        plan_draft_model(replace(settings, model=None), CONFIG, OPS)
