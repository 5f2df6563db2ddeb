"""Embeddings: the hidden states of a whole prompt as one vector, for any chunks and any cached prefix."""

from __future__ import annotations

import json

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import EngineRequest
from service.errors import EndReason
from tests.support.demo_engine import TWO_LAYERS, DemoEngines
from tests.support.goldens import Golden
from tests.support.paged import PagedSequences
from tests.unit.service.engine.execution.test_executor import FLOAT32, AheadOps

PROMPT = tuple(range(5, 75))


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(NumpyOps(FLOAT32), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def expected(engines):
    """Return, by pooling, a prompt's vector, computed at once by the model alone."""

    def vector(pooling: str, prompt=PROMPT) -> np.ndarray:
        rows = PagedSequences(engines.model, 1, len(prompt), 16).hidden(np.array(prompt)).astype(np.float64)
        pooled = rows.mean(axis=0) if pooling == "mean" else rows[-1]
        return pooled / np.linalg.norm(pooled)

    return vector


def ask(name: str, prompt=PROMPT, pooling: str | None = "mean", **params) -> EngineRequest:
    fields = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "pooling": pooling} | params
    return EngineRequest(request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**fields))


def run(engine, *requests) -> dict[str, np.ndarray]:
    """Return each request's vector, emitted once with its end; none without one."""
    received = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.drain_request_outputs():
            if output.embedding:
                assert output.end is EndReason.LENGTH
                assert output.request_id not in received
                received[output.request_id] = np.frombuffer(output.embedding, "<f4")
    return received


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("budget", [256, 16, 7])
def test_chunks_make_the_vector_of_the_whole(engines, expected, pooling, budget):
    others = [ask(f"other{i}", PROMPT[i : i + 20], pooling=None, max_tokens=30) for i in range(3)]
    received = run(engines.make(budget=budget), *others, ask("r", pooling=pooling))
    assert list(received) == ["r"]
    np.testing.assert_allclose(received["r"], expected(pooling), atol=1e-5)


def test_an_executor_that_runs_ahead_pools_alike(expected):
    others = [ask(f"other{i}", PROMPT[i : i + 20], pooling=None, max_tokens=10) for i in range(3)]
    engine = DemoEngines(AheadOps(FLOAT32), num_layers=TWO_LAYERS).make(
        budget=16
    )  # one engine: its captures take long on a CPU
    received = run(engine, *others, ask("a"), ask("b", pooling="last"))
    np.testing.assert_allclose(received["a"], expected("mean"), atol=1e-5)
    np.testing.assert_allclose(received["b"], expected("last"), atol=1e-5)


def test_prompts_of_one_step_are_distinguished(engines, expected):
    prompts = {"a": PROMPT[:9], "b": PROMPT[9:40], "c": PROMPT[40:41]}
    received = run(engines.make(budget=256), *(ask(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        np.testing.assert_allclose(received[name], expected("mean", prompt), atol=1e-5)


def test_a_prompt_that_is_in_memory_is_pooled_all_the_same(engines, expected):
    engine = engines.make(prefix_caching=True)
    run(engine, ask("before", pooling=None, max_tokens=4))
    received = run(engine, ask("a"), ask("b", pooling="last"))
    np.testing.assert_allclose(received["a"], expected("mean"), atol=1e-5)
    np.testing.assert_allclose(received["b"], expected("last"), atol=1e-5)


@pytest.mark.parametrize("num_host_blocks", [0, 24])
def test_vectors_survive_preemption(engines, expected, num_host_blocks):
    engine = engines.make(num_blocks=24, budget=24, num_host_blocks=num_host_blocks)
    received = run(engine, *(ask(f"{i}", max_tokens=40) for i in range(3)))
    assert engine.stats().num_preemptions > 0
    assert len(received) == 3
    for vector in received.values():
        np.testing.assert_allclose(vector, expected("mean"), atol=1e-5)


def test_a_cancelled_request_sends_nothing_and_leaves_nothing(engines):
    engine = engines.make(budget=16)
    engine.add_request(ask("r"))
    engine.step()
    engine.cancel("r", EndReason.CANCELLED)
    assert run(engine) == {}
    assert run(engine, ask("again", PROMPT[:3])).keys() == {"again"}


def test_a_model_without_a_head_embeds_and_refuses_to_generate(tmp_path):
    golden = Golden.load("qwen3_embedding_base_bf16")
    raw = json.loads((golden.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    (tmp_path / "model.safetensors").symlink_to(golden.folder / "model.safetensors")
    engine = build_engine(Settings(model=str(tmp_path), device="cpu"), progress=False).engine
    prompt = tuple(golden.token_ids.tolist())
    with np.load(golden.folder / "golden.npz") as arrays:
        np.testing.assert_allclose(run(engine, ask("a", prompt, "last"))["a"], arrays["embedding"], atol=1e-4)
    engine.add_request(ask("b", prompt, pooling=None))
    assert [output.end for output in engine.drain_request_outputs()] == [EndReason.INVALID]
