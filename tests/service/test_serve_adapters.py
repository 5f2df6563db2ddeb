"""`quire serve` with two adapters on the demo model: mixed requests, a killed worker, load and unload at run time."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest

from model.config import ModelConfig
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from tests.support.adapters import merged_model, write_adapter
from tests.support.demo_engine import DEMO
from tests.support.paged import PagedSequences
from tests.support.served import Served, descendants_of

PROMPT = list(range(100, 120))
NUM_TOKENS = 24
NAMES = ("demo", "fox", "owl")
METRICS_WITHIN_S = 60.0
"""The metric is of workers with a lease, which a busy machine renews late."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    config = ModelConfig.read(DEMO)
    return {
        "fox": write_adapter(folder / "fox", config, rank=8, seed=1, strength=2.0),
        "owl": write_adapter(folder / "owl", config, rank=16, seed=2, strength=2.0),
    }


@pytest.fixture(scope="module")
def wanted(adapters, tmp_path_factory):
    """Greedy tokens of the base model and of the merged ones."""
    base = load_model(DEMO, ModelConfig.read(DEMO), NumpyOps(), 64)
    folder = tmp_path_factory.mktemp("merged")
    merged = {name: merged_model(DEMO, one, folder / name, 64) for name, one in adapters.items()}
    return {name: greedy(model) for name, model in {"demo": base, **merged}.items()}


def greedy(model) -> list[int]:
    sequences, chunk, tokens = PagedSequences(model, 1, 64, 8), np.array(PROMPT, np.int32), []
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(sequences.forward([(0, chunk)])[0][-1].argmax()))
        chunk = np.array(tokens[-1:], np.int32)
    return tokens


@pytest.fixture(scope="module")
def served(adapters, tmp_path_factory):
    folder = adapters["fox"].folder.parent
    flags = ("--enable-lora", "--lora-modules", f"fox={folder}/fox", "--lora-dir", str(folder))
    running = Served(tmp_path_factory.mktemp("data"), *flags, "--max-loras", "1", "--lease", "1")
    yield running
    assert running.terminate() == 0


def tokens_of(served: Served, name: str, **fields) -> list[int]:
    body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True, **fields}
    status, text = post(served, "/v1/completions", body)
    answer = json.loads(text)
    assert (status, answer.get("model")) == (200, name), text
    return [int(token.removeprefix("token_id:")) for token in answer["choices"][0]["logprobs"]["tokens"]]


def test_adapters_of_a_mixed_load_say_what_merged_models_say(served, wanted):
    assert len(set(map(tuple, wanted.values()))) == 3
    loaded = post(served, "/v1/load_lora_adapter", {"lora_name": "owl", "lora_path": "owl"})
    assert loaded == (200, "Success: LoRA adapter 'owl' added successfully.")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == list(NAMES)
    with ThreadPoolExecutor(12) as pool:
        received = list(pool.map(lambda number: tokens_of(served, NAMES[number % 3]), range(6)))
    assert received == [wanted[NAMES[number % 3]] for number in range(6)]


def test_a_killed_worker_s_requests_go_on_with_their_adapter(served, wanted):
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(tokens_of, served, NAMES[number % 3], max_tokens=NUM_TOKENS) for number in range(6)]
        time.sleep(0.15)
        os.kill(worker_of(served), signal.SIGKILL)
        assert [one.result(60) for one in running] == [wanted[NAMES[number % 3]] for number in range(6)]


def test_unloaded_and_shown_in_the_metrics(served):
    metrics, deadline_s = "", time.monotonic() + METRICS_WITHIN_S
    while "vllm:lora_requests_info{" not in metrics and time.monotonic() < deadline_s:
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        time.sleep(0.1)
    assert "vllm:lora_requests_info{" in metrics
    assert 'max_lora="1"' in metrics
    assert post(served, "/v1/unload_lora_adapter", {"lora_name": "owl"})[0] == 200
    assert post(served, "/v1/completions", {"model": "owl", "prompt": PROMPT, "max_tokens": 2})[0] == 404


def post(served: Served, path: str, body: dict) -> tuple[int, str]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(served.url + path, data, headers), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def worker_of(served: Served) -> int:
    for pid in descendants_of(served.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"worker" in words:
            return pid
    raise AssertionError(served.output)
