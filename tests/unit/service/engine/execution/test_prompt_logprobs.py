"""Log-probabilities of prompt tokens equal those of generating the same tokens, for any chunks."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.engine.request import EngineRequest
from service.errors import EndReason
from tests.support.demo_engine import TWO_LAYERS, DemoEngines
from tests.unit.service.engine.execution.test_executor import FLOAT32, AheadOps

START = tuple(range(5, 25))


@pytest.fixture(scope="module", params=[NumpyOps, AheadOps])
def engines(request):
    return DemoEngines(request.param(FLOAT32), num_layers=TWO_LAYERS)


def ask(name: str, prompt=START, num_scored_tokens=0, **params) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, "ignore_eos": True} | params)
    return EngineRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, num_scored_tokens=num_scored_tokens)


def run(engine, *requests):
    """Return token ids and log-probabilities of each request's prompt and answer."""
    scored, generated = defaultdict(lambda: ([], [])), defaultdict(lambda: ([], []))
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.drain_request_outputs():
            for part in output.parts:
                assert not (part.is_prompt and generated[output.request_id][0]), "the prompt comes first"
                ids, logprobs = (scored if part.is_prompt else generated)[output.request_id]
                ids += part.token_ids
                logprobs += part.logprobs
    return scored, generated


@pytest.fixture(scope="module")
def received(engines):
    """A prompt of 70 tokens, the last 50 of which were generated, and their logprobs."""
    _, generated = run(engines.make(), ask("r", max_tokens=50, logprobs=3))
    ids, logprobs = generated["r"]
    return (*START, *ids), logprobs


def assert_alike(scored, received, first=1):
    ids, logprobs = scored
    prompt, generated = received
    assert tuple(ids) == prompt[first:]
    assert len(logprobs) == len(ids)
    for one, other in zip(logprobs[-len(generated) :], generated, strict=True):
        assert math.isclose(one.logprob, other.logprob, abs_tol=2e-4)
        assert one.top_ids == other.top_ids
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=2e-4)


@pytest.mark.parametrize("budget", [256, 16, 7])
def test_scores_match_generation(engines, received, budget):
    others = [ask(f"other{i}", START[i:], max_tokens=30) for i in range(3)]
    scored, _ = run(engines.make(budget=budget), *others, ask("r", received[0], prompt_logprobs=3))
    assert list(scored) == ["r"]
    assert_alike(scored["r"], received)
    assert scored["r"][1][0].top_ids != ()


def test_rows_are_taken_a_few_at_a_time(engines, received, monkeypatch):
    monkeypatch.setattr("service.engine.execution.prompt_logprobs.MAX_ROWS", 8)
    scored, _ = run(engines.make(budget=256), ask("r", received[0], prompt_logprobs=3))
    assert_alike(scored["r"], received)


def test_a_prompt_that_is_in_memory_is_scored_all_the_same(engines, received):
    engine = engines.make()
    run(engine, ask("before", received[0]))
    scored, _ = run(engine, ask("a", received[0], prompt_logprobs=3), ask("b", received[0], prompt_logprobs=3))
    assert_alike(scored["a"], received)
    assert_alike(scored["b"], received)


def test_branches_have_one_prompt(engines, received):
    params = {"prompt_logprobs": 3, "n": 3, "best_of": 3, "temperature": 1.0}
    scored, generated = run(engines.make(), ask("r", received[0], **params))
    assert_alike(scored["r"], received)
    assert len(generated["r"][0]) == 6


def test_scores_survive_preemption(engines, received):
    engine = engines.make(num_blocks=24, budget=24)
    requests = [ask(f"{i}", received[0], prompt_logprobs=3, max_tokens=40) for i in range(3)]
    scored, _ = run(engine, *requests)
    assert engine.stats().num_preemptions > 0
    for i in range(3):
        assert_alike(scored[f"{i}"], received)


def test_another_engine_sends_only_what_was_not_received(engines, received):
    scored, _ = run(engines.make(budget=16), ask("r", received[0], num_scored_tokens=33, prompt_logprobs=3))
    ids, logprobs = scored["r"]
    assert tuple(ids) == received[0][33:]
    assert len(logprobs) == len(ids) == 37
    scored, _ = run(engines.make(), ask("r", received[0], num_scored_tokens=len(received[0]), prompt_logprobs=3))
    assert not scored


def test_a_prompt_of_one_token_has_no_scores(engines):
    scored, generated = run(engines.make(), ask("r", (5,), prompt_logprobs=0))
    assert not scored
    assert len(generated["r"][0]) == 2


def test_a_cancelled_request_sends_no_more(engines, received):
    engine = engines.make(budget=16)
    engine.add_request(ask("r", received[0], prompt_logprobs=0))
    engine.step()
    engine.cancel("r", EndReason.CANCELLED)
    scored, _ = run(engine)
    assert len(scored["r"][0]) <= 16
