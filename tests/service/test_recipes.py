"""Public recipes' lines with only `vllm` replaced, offline, from a cache laid out as the hub's client lays it."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from pathlib import Path

import openai
import pytest

from service.cli.models import take_model_argument, with_model
from service.cli.parser import make_parser
from service.cli.vllm_words import translate, with_stored_format
from service.config.settings import Settings
from service.config.sources import read_settings
from service.offline.engine import OfflineEngine
from service.offline.prompts import with_conversation
from service.offline.run import Work, run_all
from service.offline.sampling_params import SamplingParams
from tests.support.hub import COMMIT
from tests.support.served import REPOSITORY, Served
from tests.support.small_models import TEMPLATES, write_cached

NAME = "meta-llama/Llama-3.1-8B-Instruct"
RECIPE = (
    *(NAME, "--tensor-parallel-size", "1", "--disable-log-requests", "--max_model_len", "1k"),
    *("--enable-auto-tool-choice", "--dtype", "float", "--trust-remote-code", "--served-model-name", "llama", "other"),
    *("--override-generation-config", '{"temperature": 0}'),
)

LINES = [
    "meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --disable-log-requests --gpu-memory-utilization 0.9 "
    "--max-model-len 8192",
    "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
    f"--chat-template {TEMPLATES / 'llama3.jinja'}",
    "meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4 --max-model-len 16384 --enable-prefix-caching "
    "--trust-remote-code",
    "meta-llama/Llama-3.2-3B-Instruct --dtype half --max-model-len 4096 --enforce-eager --host 0.0.0.0",
    "Qwen/Qwen3-8B --enable-reasoning --reasoning-parser deepseek_r1 --enable-auto-tool-choice "
    "--tool-call-parser hermes",
    "Qwen/Qwen2.5-7B-Instruct --dtype bfloat16 --max-model-len 32768 --served-model-name qwen "
    "--gpu-memory-utilization 0.95",
    "Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 --max-num-seqs 64 --reasoning-parser qwen3 --kv-cache-dtype fp8 "
    "--enable-chunked-prefill",
    "mistralai/Mistral-7B-Instruct-v0.3 --tokenizer-mode mistral --config-format mistral --load-format mistral "
    "--enable-auto-tool-choice --tool-call-parser mistral",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503 --tokenizer_mode mistral --config_format mistral "
    "--load_format mistral --tool-call-parser mistral --enable-auto-tool-choice --limit_mm_per_prompt image=10 "
    "--tensor-parallel-size 2",
]


def settings_of(line: str) -> Settings:
    """The settings of `quire serve LINE`, with the model's folder."""
    parser = make_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    done = translate(shlex.split(line), verbs.choices["serve"]._option_string_actions)
    flags = parser.parse_args(["serve", *done.argv])
    take_model_argument(flags)
    return with_stored_format(with_model(read_settings("serve", flags, {})), done.stored_format)


@pytest.mark.parametrize("line", LINES, ids=[f"{number} {line.split()[0]}" for number, line in enumerate(LINES)])
def test_a_recipe_chats_on_a_small_model_of_its_architecture(line, tmp_path, monkeypatch):
    """Without processes: what the gateway reads and what the worker builds, of one line's settings."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_cached(tmp_path, line.split()[0])
    engine = OfflineEngine(settings_of(line), 0)
    try:
        asked = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True).request()
        request = with_conversation(asked, {"messages": [{"role": "user", "content": "A story about a fox"}]})
        work = Work(requests=[request], request_ids=["a"], texts=[None], has_text=[True], order=[0], adapters=[None])
        ((output, _),) = run_all(engine, work, False)
        assert len(output.outputs[0].token_ids) == 4
    finally:
        engine.shut_down()


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
