"""Meaning of a typed model: a folder first, then the cache, and no network if offline."""

import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import ModelError
from model.hub.locate import LocatedModel, locate_model
from tests.support.source_tree import ROOT

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere"}


def refusal(typed: str, **choices) -> str:
    with pytest.raises(ModelError) as refused:
        locate_model(typed, OFFLINE, **choices)
    return str(refused.value)


def test_a_folder_wins_over_a_repository_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert locate_model("org/name", OFFLINE) == LocatedModel(Path("org/name"), None)
    assert refusal("org/name", revision="v1") == "org/name: a folder has no revision v1"


def test_words_that_are_neither(tmp_path):
    for typed in ("name", str(tmp_path / "none"), "a/b/c"):
        assert refusal(typed) == f"{typed}: no such folder (a folder, or org/name of a Hugging Face model)"
    assert refusal("org/name:v1").endswith("model); a branch, tag or commit of org/name goes to --revision")
    assert refusal("x" * 256) == f"{'x' * 256}: cannot be read: File name too long"


@pytest.mark.parametrize("endpoint", ["", "localhost:9", "ftp://host", "http://host:99999", "http://"])
def test_an_endpoint_that_is_no_url(endpoint, tmp_path):
    with pytest.raises(ModelError, match=r"^HF_ENDPOINT: .* is not a URL"):
        locate_model("org/name", {"HF_ENDPOINT": endpoint}, download_dir=tmp_path)


def test_a_name_that_is_not_in_the_cache_offline():
    assert refusal("org/name") == (
        "org/name: no such folder, and its copy in /nowhere/hub is not there (HF_HUB_OFFLINE forbids a download)"
    )
    assert refusal("org/name", download_dir=Path("/else")).startswith("org/name: no such folder, and its copy in /else")


def test_the_client_is_not_imported_before_a_download():
    program = "import sys, model.hub.locate, service.cli.main; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0
