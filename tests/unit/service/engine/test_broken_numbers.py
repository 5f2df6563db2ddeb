"""A token whose logits are NaN: its requests end with an error, and no others are affected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.engine.request import EngineRequest
from service.errors import EndReason
from tests.support.demo_engine import BLOCK_SIZE, TWO_LAYERS, DemoEngines
from tests.unit.service.engine.execution.test_executor import FLOAT32, AheadOps

BROKEN = 900
BEGINNING = tuple(range(100, 100 + 3 * BLOCK_SIZE))
TAIL = tuple(range(200, 200 + 2 * BLOCK_SIZE))


@pytest.fixture(scope="module", params=[NumpyOps, AheadOps])
def engines(request):
    """Make a model that returns NaN after one token, which may itself be sampled."""
    made = DemoEngines(request.param(FLOAT32), num_layers=TWO_LAYERS)
    weights = made.model.weights
    embedding = np.array(weights.embedding)
    embedding[BROKEN] = np.nan
    made.model = Llama(made.model.config, made.model.ops, replace(weights, embedding=embedding))
    return made


def request_of(name: str, prompt: tuple[int, ...], **params) -> EngineRequest:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params
    return EngineRequest(request_id=name, prompt=prompt, sampling=SamplingParams(**params))


def finish(engine) -> dict[str, tuple[list[int], EndReason | None]]:
    """Return each request's tokens and end."""
    received: dict[str, tuple[list[int], EndReason | None]] = {}
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.drain_request_outputs():
            tokens, _ = received.get(output.request_id, ([], None))
            received[output.request_id] = (tokens + [t for part in output.parts for t in part.token_ids], output.end)
    return received


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("num_common", [len(BEGINNING), len(BEGINNING) - 3])
def test_who_begins_alike_gets_what_it_would_get_alone(engines, num_steps, num_common):
    """It arrives with the other, during it or after it; their common prefix is shared."""
    common = BEGINNING[:num_common]
    good = request_of("good", (*common, 7, *TAIL))
    alone = engines.make(prefix_caching=True)
    alone.add_request(good)
    wanted = finish(alone)["good"]
    engine = engines.make(prefix_caching=True)
    engine.add_request(request_of("bad", (*common, BROKEN, *TAIL)))
    for _ in range(num_steps):
        engine.step()
    engine.add_request(good)
    received = finish(engine)
    assert received["bad"] == ([], EndReason.NUMERICAL_ERROR)
    assert received["good"] == wanted
    assert wanted[1] is EndReason.LENGTH


@pytest.mark.parametrize("num_tokens", [3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
def test_nothing_of_it_is_kept_for_who_comes_later(engines, num_tokens):
    """Though the last chunk is a single token, which fills a block or does not."""
    engine = engines.make(prefix_caching=True, budget=num_tokens - 1)
    engine.add_request(request_of("bad", (*BEGINNING[:5], BROKEN, *TAIL, *TAIL)[:num_tokens]))
    assert finish(engine)["bad"] == ([], EndReason.NUMERICAL_ERROR)
    assert engine.stats().num_blocks_cached == 0


def test_tokens_before_it_keep_their_probabilities(engines):
    engine = engines.make()
    engine.add_request(request_of("bad", (*BEGINNING, BROKEN, *TAIL), prompt_logprobs=0))
    engine.add_request(request_of("good", (*BEGINNING, 7, *TAIL), prompt_logprobs=0))
    received: dict[str, list[float]] = {"bad": [], "good": []}
    while engine.has_work:
        engine.step()
        for output in engine.drain_request_outputs():
            scored = [one for part in output.parts if part.is_prompt for one in part.logprobs]
            received[output.request_id] += [one.logprob for one in scored]
    num_before = len(BEGINNING) - 1  # the first token has none
    assert len(received["good"]) == num_before + 1 + len(TAIL)
    np.testing.assert_allclose(received["bad"][:num_before], received["good"][:num_before], rtol=1e-5)
