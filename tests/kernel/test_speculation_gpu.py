"""Engines with drafts on the device, a step ahead and on captured graphs, against the same engine without."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.text.grammar import choice_grammar, regex_grammar
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from tests.fakes.drafters import KnowingDrafter, LyingDrafter, OutOfRangeDrafter, WrongLengthDrafter
from tests.support.demo_engine import WISHES, DemoEngines, run_all

pytestmark = pytest.mark.gpu

PARAMS = (
    *WISHES,
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2, "ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "grammar": regex_grammar("[a-z ]{5,40}")},
    {"temperature": 0.8, "seed": 4, "grammar": choice_grammar(["the cat sat on the mat", "the cat slept"])},
)
DRAFTERS = {
    "knows": KnowingDrafter,
    "errs": lambda answers: KnowingDrafter(answers, errs=True),
    "lies": lambda _: LyingDrafter(),
    "out of range": lambda _: OutOfRangeDrafter(),
    "wrong length": lambda _: WrongLengthDrafter(),
    "ngram": lambda _: NgramDrafter(1, 4),
    "suffix": lambda _: SuffixDrafter(max_depth=24, max_requests=20, max_spec_factor=2.0, min_token_prob=0.1),
}


@pytest.fixture(scope="module")
def engines(open_ops):
    return DemoEngines(open_ops("float32"))


@pytest.fixture(scope="module")
def plain():
    """Tokens without drafts, on NumPy in float32."""
    received = run_all(DemoEngines(NumpyOps(np.dtype(np.float32))).make(num_blocks=400), PARAMS)
    return {name: tokens for name, (tokens, _) in received.items()}


SIZES = ({"max_num_seqs": 1}, {"budget": 24}, {"num_blocks": 30})


@pytest.mark.parametrize(("name", "sizes"), [(name, {}) for name in DRAFTERS] + [("errs", each) for each in SIZES])
def test_drafts_change_no_token(engines, plain, name, sizes):
    """Steps have chunks of prompts too, more drafts than rows, and preemptions."""
    answers = {(request, 0): tokens for request, tokens in plain.items()}
    engine = engines.make(drafter=DRAFTERS[name](answers), **sizes)
    received = run_all(engine, PARAMS)
    assert {request: tokens for request, (tokens, _) in received.items()} == plain
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if name == "knows":
        assert stats.num_accepted_by_source[1] > 50


@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 1}, {"num_blocks": 30, "prefix_caching": True}], ids=str)
def test_a_draft_model_changes_no_token(engines, plain, open_ops, num_layers, sizes):
    """The model itself, and its first layers; their keys lie in a cache of their own."""
    draft = DemoEngines(open_ops("float32"), num_layers=num_layers).model
    engine = engines.make(draft=draft, **sizes)
    received = run_all(engine, PARAMS)
    assert {request: tokens for request, (tokens, _) in received.items()} == plain
    stats = engine.stats()
    assert stats.num_drafted_by_source[4] > 0
    if num_layers is None:
        assert stats.num_accepted_by_source[4] > 0.5 * stats.num_drafted_by_source[4]


def test_a_bf16_engine_of_one_sequence_emits_the_same_tokens(open_ops, monkeypatch):
    """One row's products are gemv's, so that exact rows have its bits."""
    tuning = pytest.importorskip("model.ops.gpu.gemm_tuning", reason="needs the packages of the cuda extra")

    class FewByGemv(dict):
        def __contains__(self, shape):  # nothing is measured anew
            return True

        def get(self, shape, default=None):
            return tuning.GemmAlgorithm(tuning.GEMV, 0) if shape.m <= 8 else default

    ops = open_ops("bfloat16")
    monkeypatch.setattr(ops._linear, "_tuning", FewByGemv(any=0))
    engines = DemoEngines(ops)
    params = [{"temperature": 1.0, "seed": number, "ignore_eos": True, "max_tokens": 60} for number in range(8)]
    wanted = run_all(engines.make(max_num_seqs=1), params)
    answers = {(request, 0): tokens for request, (tokens, _) in wanted.items()}
    for errs in (False, True):
        engine = engines.make(max_num_seqs=1, drafter=KnowingDrafter(answers, errs=errs))
        received = run_all(engine, params)
        assert {name: tokens for name, (tokens, _) in received.items()} == {
            name: tokens for name, (tokens, _) in wanted.items()
        }
        assert engine.stats().num_accepted_by_source[1] > 100
