from dataclasses import replace
from pathlib import Path

import pytest

from model.config import ModelConfig
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.drafting.models import plan_draft_model
from service.errors import StartupError
from tests.support.demo_engine import DEMO

CONFIG = ModelConfig.read(DEMO)
EAGLE3 = SpeculativeConfig(method="eagle3")
SETTINGS = Settings(model=DEMO, device="cpu", speculative_config=EAGLE3)


def test_a_head_lies_in_the_models_folder_unless_it_is_named():
    found = plan_draft_model(SETTINGS, CONFIG)
    assert found.folder == DEMO / "eagle3"
    assert found.block_shape(16) == (1, 2, 2, 16, 64)
    named = replace(SETTINGS, speculative_config=replace(EAGLE3, model=DEMO / "eagle3"))
    assert plan_draft_model(replace(named, model=Path("elsewhere")), CONFIG) == found


def test_other_settings_name_no_head():
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    for wanted in (None, ngram):
        assert plan_draft_model(replace(SETTINGS, speculative_config=wanted), CONFIG) is None
    assert plan_draft_model(SETTINGS, replace(CONFIG, has_head=False)) is None


@pytest.mark.parametrize(
    ("model", "refusal"),
    [(DEMO / "nowhere", "nowhere: no such folder"), (DEMO, "no EAGLE-3 head of the speculators library")],
)
def test_a_wrong_folder_is_refused_under_the_flags_name(model, refusal):
    with pytest.raises(StartupError, match=rf"^--speculative-config: .*{refusal}"):
        plan_draft_model(replace(SETTINGS, speculative_config=replace(EAGLE3, model=model)), CONFIG)
