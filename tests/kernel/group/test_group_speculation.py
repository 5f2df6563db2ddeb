"""Drafted steps on a group of GPUs: captured, verified by all ranks, drafted by rank 0."""

import pytest

from model.ops.backend import open_ops
from tests.kernel.test_speculation_gpu import DRAFTERS, PARAMS
from tests.support.demo_engine import TWO_LAYERS, DemoEngines, run_all

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engines(open_group):
    return DemoEngines(open_group("float32"))


@pytest.fixture(scope="module")
def plain(engines):
    return tokens_of(run_all(engines.make(num_blocks=400), PARAMS))


def tokens_of(received):
    return {name: tokens for name, (tokens, _) in received.items()}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("knows", {}), ("errs", {}), ("errs", {"num_blocks": 30}), ("errs", {"budget": 24}), ("ngram", {}), ("lies", {})],
    ids=str,
)
def test_drafts_change_no_token(engines, plain, name, sizes):
    engine = engines.make(drafter=DRAFTERS[name]({(request, 0): tokens for request, tokens in plain.items()}), **sizes)
    assert tokens_of(run_all(engine, PARAMS)) == plain
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if name == "knows":
        assert stats.num_accepted_by_source[1] > 50


@pytest.mark.parametrize("num_layers", [None, TWO_LAYERS])
def test_rank_0_runs_a_draft_model_for_all(engines, plain, num_layers):
    draft = DemoEngines(open_ops("cuda", "float32", "float32"), num_layers=num_layers).model
    engine = engines.make(draft=draft, num_blocks=60, prefix_caching=True)
    assert tokens_of(run_all(engine, PARAMS)) == plain
    stats = engine.stats()
    assert stats.num_drafted_by_source[4] > 0
    if num_layers is None:
        assert stats.num_accepted_by_source[4] > 0.5 * stats.num_drafted_by_source[4]
