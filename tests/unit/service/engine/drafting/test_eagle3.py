"""State of the drafter between steps: keys and values lie where the prefix cache, forks and swaps find them."""

import numpy as np
import pytest

from model.families.eagle3 import load_eagle3
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.engine.drafting.eagle3 import _Context
from service.engine.request import EngineRequest
from tests.support.demo_engine import DEMO, MAX_LEN, DemoEngines
from tests.support.received import run_steps

PROMPT = (0, 3, *range(300, 360), 1, 4)


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


@pytest.fixture(scope="module")
def head(engines):
    return load_eagle3(DEMO / "eagle3", engines.model.config, engines.model.weights.embedding, MAX_LEN)


def run(engine, name, prompt=PROMPT, **params):
    sampling = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | params)
    engine.add_request(EngineRequest(request_id=name, prompt=prompt, sampling=sampling))
    return run_steps(engine)[name]


def drafted(engine):
    stats = engine.stats()
    return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens


def test_a_prompt_found_in_the_cache_is_drafted_for_as_if_computed(engines, head):
    cold, warm = (engines.make(draft=head, prefix_caching=True) for _ in range(2))
    wanted = run(cold, "a").branches
    run(warm, "first", max_tokens=1)
    before = drafted(warm)
    assert run(warm, "a").branches == wanted
    assert tuple(np.subtract(drafted(warm), before)) == drafted(cold)


def test_a_short_catch_up_computes_the_keys_of_a_long_one(engines, head):
    """Keys that are written in parts, with rejected drafts between, are those of the tokens in the end."""
    stepwise, at_once = (engines.make(draft=head, prefix_caching=True) for _ in range(2))
    tokens = run(stepwise, "a").branches[0]
    run(at_once, "a", (*PROMPT, *tokens), max_tokens=1)
    caches = [engine.speculation._drafter._kv for engine in (stepwise, at_once)]
    used = (len(PROMPT) + len(tokens) - 2) // caches[0].shape[4]  # full blocks whose next token is known
    tables = [sorted(np.flatnonzero(np.abs(cache).sum(axis=(1, 2, 3, 4, 5)) > 0)) for cache in caches]
    assert min(map(len, tables)) >= used
    for first, second in zip(*(table[:used] for table in tables), strict=True):
        np.testing.assert_allclose(caches[0][first], caches[1][second], atol=2e-3)


def test_poisoned_blocks_change_no_token(engines, head):
    requests = [("a", {}), ("b", {"n": 2, "best_of": 2, "temperature": 0.8, "seed": 1}), ("c", {"temperature": 0.9})]
    plain, poisoned = engines.make(), engines.make(num_blocks=24, draft=head, poisons=True, num_host_blocks=8)
    for name, params in requests:
        assert run(poisoned, name, **params).branches == run(plain, name, **params).branches


def test_an_ended_sequence_keeps_no_states(engines, head):
    engine = engines.make(draft=head)
    run(engine, "a", max_tokens=2)
    assert engine.speculation._drafter._states == {}


def test_a_window_moves_with_the_drafts():
    mask = np.where(np.arange(8) < np.array([[2], [5]]), 0, -np.inf).astype(np.float32)[:, None, None]
    mask[1, 0, 0, :2] = -np.inf
    context = _Context(np.zeros((2, 1, 8, 4), np.float32), np.zeros((2, 1, 8, 4), np.float32), mask, window=3)
    for step in range(2):
        context.add(np.array([2, 5]) + step, np.ones((2, 1, 4)), np.ones((2, 1, 4)))
    assert [np.flatnonzero(row[0, 0] == 0).tolist() for row in context.mask] == [[1, 2, 3], [4, 5, 6]]
