"""Downloads by the real client from a hub on loopback, its faults included."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.utils._http
import pytest

from model.errors import ModelError
from model.hub.cache import CachedRepository
from model.hub.files import DRAFT_FILES
from model.hub.locate import locate_model
from tests.support.hub import COMMIT, NAME, Hub
from tests.support.source_tree import ROOT

DEMO = ROOT / "model" / "demo"
CHUNK = 4096
WEIGHTS = os.urandom(40 * CHUNK)  # the download does not read them
SMALL = ("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = {
    **{name: (DEMO / name).read_bytes() for name in SMALL},
    "model.safetensors": WEIGHTS,
    "README.md": b"a page",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"code",
    "original/consolidated.safetensors": b"another form",
}
SERVED = sorted((*SMALL, "model.safetensors"))
ONLINE = {"HOME": "/nowhere"}


@pytest.fixture
def hub(monkeypatch):
    constants = huggingface_hub.constants
    with Hub(FILES) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        urls = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
            monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield running


def locate(cache: Path, **choices: str) -> Path:
    return locate_model(NAME, ONLINE, choices.get("revision"), cache).folder


def refusal(cache: Path, **choices: str) -> str:
    with pytest.raises(ModelError) as refused:
        locate(cache, **choices)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_only_what_is_served_is_fetched_and_then_kept(hub, tmp_path):
    folder = locate(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == SERVED == hub.fetched()
    agents = {headers["user-agent"].partition(";")[0] for _, _, headers in hub.asked}
    assert {agent for agent in agents if "httpx" not in agent} == {f"quire/{version('quire')}"}  # httpx: a CDN's
    assert {name: (folder / name).read_bytes() for name in SERVED} == {name: FILES[name] for name in SERVED}
    hub.asked.clear()
    assert locate(tmp_path) == locate(tmp_path, revision=COMMIT) == folder
    assert hub.asked == []


def test_a_head_has_no_tokenizer_and_no_models_config(hub, tmp_path):
    config = b'{"speculators_model_type": "eagle3", "draft_vocab_size": 9}'
    hub.files = {"config.json": config, "model.safetensors": WEIGHTS, "eagle3.py": b"code"}
    folder = locate_model(NAME, ONLINE, None, tmp_path, DRAFT_FILES).folder
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_shards_named_by_the_index(hub, tmp_path):
    shards = {f"model-{n}-of-2.safetensors": bytes([n]) * CHUNK for n in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    kept = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    hub.files = {**kept, **shards, "model.safetensors.index.json": index, "extra.safetensors": b"none of them"}
    assert sorted(path.name for path in locate(tmp_path).iterdir()) == sorted(
        (*SMALL, *shards, "model.safetensors.index.json")
    )


def test_a_connection_cut_in_half_resumes_by_range(hub, tmp_path):
    hub.cuts = [len(WEIGHTS) // 2, 3 * CHUNK]
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges() == ["", f"bytes={20 * CHUNK}-", f"bytes={23 * CHUNK}-"]


def test_a_cut_loses_at_most_a_mebibyte(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10 << 20)  # the client's own
    hub.files, hub.cuts = {**FILES, "model.safetensors": bytes(3 << 20)}, [3 << 19]
    locate(tmp_path)
    assert hub.ranges() == ["", f"bytes={1 << 20}-"]


def test_a_connection_that_breaks_again_and_again(hub, tmp_path):
    hub.cuts = [0] * 20
    assert refusal(tmp_path).startswith(f"{NAME}: the download from {hub.url} failed: ")
    assert not any((tmp_path / "models--org--tiny" / "blobs").glob("*.incomplete"))
    hub.cuts = []
    assert sorted(path.name for path in locate(tmp_path).iterdir()) == SERVED


def test_a_wrong_hash_is_dropped_and_fetched_again(hub, tmp_path):
    hub.garbled = True
    assert refusal(tmp_path) == (
        f"{NAME}: model.safetensors: its hash is wrong; it was removed (start again to fetch it again)"
    )
    hub.garbled = False
    hub.asked.clear()
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched() == ["model.safetensors"]


def test_a_hub_that_limits_requests_for_a_while(hub, tmp_path):
    hub.limited_heads = 3
    assert sorted(path.name for path in locate(tmp_path).iterdir()) == SERVED


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("missing", "no such model at {url}; if it is private, set HF_TOKEN"),
        ("gated", "gated: accept its terms at {url}/org/tiny, then set HF_TOKEN to a token of that account"),
        ("bad token", "{url} does not accept the token (HF_TOKEN)"),
        ("forbidden", "{url} forbids it (403); HF_TOKEN needs the right to read it"),
        ("limited", "{url} limits requests (429); wait, or set HF_TOKEN"),
        ("broken", "{url} answers 500"),
        ("page", "{url} does not answer as a model hub does (is HF_ENDPOINT right?)"),
    ],
)
def test_one_line_for_each_refusal(hub, tmp_path, kind, line):
    hub.refusal = kind
    assert refusal(tmp_path) == f"{NAME}: {line.format(url=hub.url)}"


def test_an_unknown_revision(hub, tmp_path):
    assert refusal(tmp_path, revision="v9") == f"{NAME}: has no revision v9"


def test_a_hub_that_never_answers(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    hub.is_silent = True
    assert refusal(tmp_path) == f"{NAME}: the download from {hub.url} failed: timed out (start again to continue)"


def test_a_hub_that_is_not_there(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "Connection refused" in refusal(tmp_path)


def test_the_token_goes_to_the_hub_only(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    locate(tmp_path)
    seen = {path.startswith("/cdn/"): headers.get("authorization") for _, path, headers in hub.asked}
    assert seen == {False: "Bearer hf_secret", True: None}


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        (("model.safetensors",), "has no model.safetensors (pickled weights are never loaded)"),
        (("tokenizer.json",), "has no tokenizer.json"),
    ],
)
def test_a_repository_that_cannot_be_served_costs_no_weights(hub, tmp_path, dropped, reason):
    hub.files = {name: data for name, data in FILES.items() if name not in dropped}
    assert refusal(tmp_path) == f"{NAME}: {reason}"
    assert hub.ranges() == []


def test_an_unknown_architecture_costs_no_weights(hub, tmp_path):
    config = json.loads(FILES["config.json"]) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    hub.files = {**FILES, "config.json": json.dumps(config).encode()}
    assert "mamba" in refusal(tmp_path).lower()
    assert hub.ranges() == []


def test_a_disk_that_is_too_small_and_one_that_fills_up(hub, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as small:
        small.setattr("model.hub.download.disk_usage", lambda path: usage(0, 0, 1000))
        assert refusal(tmp_path) == f"{NAME}: needs 0.00 GiB, but {tmp_path} has 0.00 GiB free"

    lines = {errno.ENOSPC: "no space left in {}", errno.EFBIG: "{} cannot be written: File too large"}
    for code, line in lines.items():

        def failing(*_: object, code: int = code, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(huggingface_hub.file_download, "http_get", failing)
        assert refusal(tmp_path) == f"{NAME}: {line.format(tmp_path)}"


def test_a_token_outside_ascii(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_é")
    assert refusal(tmp_path) == f"{NAME}: HF_TOKEN: has characters outside ASCII"
    assert hub.asked == []


def test_a_killed_download_leaves_no_model_and_the_next_completes(tmp_path):
    program = "import os; from model.hub.locate import locate_model; print(locate_model('org/tiny', os.environ).folder)"
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    repository = CachedRepository.of(tmp_path / "hub", NAME)
    with Hub(FILES, stalls=1) as hub:
        command = [sys.executable, "-c", program]
        environ["HF_ENDPOINT"] = hub.url
        killed = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
        while not hub.ranges():
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with pytest.raises(ModelError, match="interrupted"):
            repository.complete_snapshot("main")
        offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        with pytest.raises(ModelError, match="interrupted download"):
            locate_model(NAME, offline)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == repository.complete_snapshot("main") == locate_model(NAME, offline).folder
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert (repository.folder / "blobs" / digest).read_bytes() == WEIGHTS
