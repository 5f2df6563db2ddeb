"""Folders of what a command line names: adapters of Hugging Face by org/name."""

from pathlib import Path

import pytest

from model.config import ModelConfig
from model.hub.cache import CachedRepository
from service.cli.models import DEMO_MODEL, with_model
from service.config.lora import LoraModule, LoraModules
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.errors import StartupError
from tests.support.adapters import write_adapter
from tests.support.expert_adapters import write_expert_adapter
from tests.support.goldens import FOLDER as GOLDENS
from tests.support.hub import COMMIT

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that holds the adapter org/sql, offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached = CachedRepository.of(tmp_path, "org/sql")
    snapshot = cached.folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cached.folder / "refs").mkdir()
    (cached.folder / "refs" / "main").write_text(COMMIT)
    for name in FILES:
        (snapshot / name).write_text("{}")
    return tmp_path


def settings_of(cache, path: str, **choices) -> Settings:
    modules = LoraModules((LoraModule("sql", path), LoraModule("talk", "/adapters/talk")))
    return with_model(Settings(model=DEMO_MODEL, lora_modules=modules, download_dir=cache, **choices))


def test_an_adapter_is_found_in_the_cache(cache):
    found = settings_of(cache, "org/sql", enable_lora=True)
    folder = cache / "models--org--sql" / "snapshots" / COMMIT
    assert [module.path for module in found.lora_modules.modules] == [str(folder), "/adapters/talk"]
    assert settings_of(cache, "org/sql").lora_modules.modules[0].path == "org/sql"  # adapters are off


def test_experts_follow_from_the_adapters_given(tmp_path, cache):
    """An unreadable adapter adapts no experts; a flag stays."""
    config = ModelConfig.read(GOLDENS / "qwen3_moe_dense_layer_bf16")
    write_expert_adapter(tmp_path / "experts", config)
    write_adapter(tmp_path / "attention", config, targets=("q_proj",))
    for name, wanted in (("experts", True), ("attention", False), ("absent", False)):
        assert settings_of(cache, str(tmp_path / name), enable_lora=True).lora_experts is wanted
    assert settings_of(cache, str(tmp_path / "absent"), enable_lora=True, lora_experts=True).lora_experts
    assert not settings_of(cache, str(tmp_path / "experts")).lora_experts  # adapters are off


def test_a_folder_wins(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "sql").mkdir(parents=True)
    assert settings_of(cache, "org/sql", enable_lora=True).lora_modules.modules[0].path == "org/sql"


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("adapter_model.safetensors", "has no adapter_model.safetensors"), ("", "org/none: no such folder, and its copy")],
)
def test_offline_a_missing_adapter_is_one_line(cache, missing, reason):
    if missing:
        next(cache.glob(f"*/*/*/{missing}")).unlink()
    with pytest.raises(StartupError) as refused:
        settings_of(cache, "org/sql" if missing else "org/none", enable_lora=True)
    assert str(refused.value).startswith("--lora-modules: org/")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def drafts_of(cache, **choices) -> SpeculativeConfig:
    found = with_model(Settings(model=DEMO_MODEL, speculative_config=SpeculativeConfig(**choices), download_dir=cache))
    return found.speculative_config


def test_a_head_is_found_in_the_cache_and_names_its_method(cache):
    folder = cache / "models--org--sql" / "snapshots" / COMMIT
    (folder / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    (folder / "model.safetensors").touch()
    for method in ("eagle3", "draft_model"):
        found = drafts_of(cache, method=method, model=Path("org/sql"), revision="main")
        assert found == SpeculativeConfig(method="eagle3", model=folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"^--speculative-config: draft_model needs num_speculative_tokens"):
        drafts_of(cache, method="draft_model", model=Path("org/sql"))
    with pytest.raises(StartupError, match=r"^--speculative-config: org/none: no such folder, and its copy"):
        drafts_of(cache, method="eagle3", model=Path("org/none"))
