"""A public recipe's line with only `vllm` replaced, offline, from a cache laid out as the hub's client lays it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import openai

from tests.support.hub import COMMIT
from tests.support.served import REPOSITORY, Served

NAME = "meta-llama/Llama-3.1-8B-Instruct"
RECIPE = (
    *(NAME, "--tensor-parallel-size", "1", "--disable-log-requests", "--max_model_len", "1k"),
    *("--enable-auto-tool-choice", "--dtype", "float", "--trust-remote-code", "--served-model-name", "llama", "other"),
    *("--override-generation-config", '{"temperature": 0}'),
)


def cached_demo(home: Path) -> None:
    """The demo model, cached under the recipe's name: blobs by their hashes, links, and the branch main."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in (REPOSITORY / "model" / "demo").glob("*.*"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (repository / "blobs" / digest).symlink_to(path)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")


def test_a_recipe_serves_a_cached_model_offline(tmp_path, monkeypatch):
    cached_demo(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    running = Served(tmp_path / "data", *RECIPE)
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["llama", "other"]
            story = [{"role": "user", "content": "Tell me a story about a fox."}]
            answers = [
                client.chat.completions.create(model=name, messages=story, max_tokens=20) for name in ("llama", "other")
            ]
            assert answers[0].choices[0].message == answers[1].choices[0].message  # temperature 0 by the recipe
            assert [answer.model for answer in answers] == ["llama", "llama"]
    finally:
        running.terminate()
    for flag in ("--disable-log-requests", "--enable-auto-tool-choice", "--trust-remote-code"):
        assert running.output.count(f"{flag} has no effect: ") == 1
