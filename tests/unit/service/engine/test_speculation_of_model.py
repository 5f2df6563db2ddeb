"""The demo model with drafts says what it says without: the same tokens, ends and log-probabilities."""

import random
from dataclasses import replace

import numpy as np
import pytest

from model.families.eagle3 import Eagle3Head, load_eagle3
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.text.grammar import choice_grammar, regex_grammar
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from service.engine.request import BranchHistory, EngineRequest
from tests.fakes.drafters import KnowingDrafter, LyingDrafter, OutOfRangeDrafter, WrongLengthDrafter
from tests.support.demo_engine import DEMO, MAX_LEN, TWO_LAYERS, DemoEngines
from tests.support.group import group_of
from tests.support.received import run_steps

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "branches": {"temperature": 0.8, "n": 3, "best_of": 3},
    "ranked": {"temperature": 0.8, "n": 1, "best_of": 2},
    "grammar": {"temperature": 0.8, "grammar": regex_grammar("[a-z ]{5,40}")},
    "forced": {"temperature": 0.8, "grammar": choice_grammar(["the cat sat on the mat", "the cat slept"])},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 9},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "stops": {"temperature": 0.8, "stop_token_ids": tuple(range(300, 600)), "min_tokens": 4},
}
DIVIDED_KINDS = ("greedy", "temperature", "branches", "grammar", "logprobs")
DRAFTERS = {
    "knows": KnowingDrafter,
    "errs": lambda answers: KnowingDrafter(answers, errs=True),
    "lies": lambda _: LyingDrafter(),
    "out of range": lambda _: OutOfRangeDrafter(),
    "wrong length": lambda _: WrongLengthDrafter(),
    "ngram": lambda _: NgramDrafter(1, 4),
    "suffix": lambda _: SuffixDrafter(max_depth=24, max_requests=20, max_spec_factor=2.0, min_token_prob=0.1),
}


HEADS = ("eagle3", "lying head", "two layers", "same model")


@pytest.fixture(scope="module")
def heads(whole):
    """The demo model's head, one that says anything, and draft models."""
    model = whole.model
    head = load_eagle3(DEMO / "eagle3", model.config, model.weights.embedding, MAX_LEN)
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in head.config.shapes().items()}
    token_ids = rng.integers(0, model.config.vocab_size, head.config.draft_vocab_size)
    liar = Eagle3Head(head.config, weights, token_ids, model.weights.embedding, MAX_LEN)
    two_layers = DemoEngines(model.ops, num_layers=TWO_LAYERS).model
    return dict(zip(HEADS, (head, liar, two_layers, model), strict=True))


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(NumpyOps(np.dtype(np.float32)), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def whole():
    """The model that the head was trained for."""
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


@pytest.fixture(scope="module")
def divided():
    return DemoEngines(group_of(2))


def requests_of(num_each: int, seed: int = 0) -> list[EngineRequest]:
    rng = random.Random(seed)
    requests = []
    for number in range(num_each * len(KINDS)):
        params = [*KINDS.values()][number % len(KINDS)]
        words = [rng.randrange(5, 1500) for _ in range(rng.randrange(2, 9))]
        sampling = SamplingParams(max_tokens=rng.randrange(4, 30), seed=rng.getrandbits(60), **params)
        requests.append(EngineRequest(request_id=str(number), prompt=tuple(words * 3), sampling=sampling))
    return requests


def received_by(engine, requests):
    for one in requests:
        engine.add_request(one)
    return run_steps(engine)


@pytest.fixture(scope="module")
def requests():
    return requests_of(2)


@pytest.fixture(scope="module")
def plain(engines, requests):
    return received_by(engines.make(num_blocks=400), requests)


@pytest.fixture(scope="module")
def plain_of_whole(whole, requests):
    return received_by(whole.make(num_blocks=400), requests)


@pytest.fixture(scope="module")
def answers(plain):
    return {(name, branch): tokens for name, received in plain.items() for branch, tokens in received.branches.items()}


def stats_of_the_same_answers(engine, requests, plain):
    received = received_by(engine, requests)
    for one in requests:
        wanted, got = plain[one.request_id], received[one.request_id]
        assert (got.by_branch(), got.end) == (wanted.by_branch(), wanted.end), one
        for branch, logprobs in wanted.logprobs.items():
            chosen = [each.logprob for each in got.logprobs[branch]]
            np.testing.assert_allclose(chosen, [each.logprob for each in logprobs], atol=2e-4)
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    assert stats.num_blocks_used == 0
    assert stats.num_output_tokens == sum(len(own) for one in plain.values() for own in one.branches.values())
    return stats


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_token(engines, requests, plain, answers, name):
    engine = engines.make(num_blocks=60, block_size=16, num_host_blocks=20, drafter=DRAFTERS[name](answers))
    stats = stats_of_the_same_answers(engine, requests, plain)
    if name == "knows":
        assert stats.num_accepted_by_source[1] == stats.num_drafted_by_source[1]


@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_a_model_change_no_token(whole, heads, requests, plain_of_whole, name):
    engine = whole.make(num_blocks=60, block_size=16, num_host_blocks=20, draft=heads[name])
    stats = stats_of_the_same_answers(engine, requests, plain_of_whole)
    if name == "eagle3":
        assert stats.num_accepted_by_source[3] > 50
    if name == "same model":
        assert stats.num_accepted_by_source[4] > 0.8 * stats.num_drafted_by_source[4] > 100  # penalties change some


@pytest.mark.parametrize(("name", "source"), [("eagle3", 3), ("two layers", 4)])
def test_rank_0_drafts_for_all(divided, heads, requests, plain_of_whole, name, source):
    some = [requests[list(KINDS).index(kind)] for kind in DIVIDED_KINDS]
    engine = divided.make(num_blocks=16, block_size=8, num_host_blocks=20, prefix_caching=True, draft=heads[name])
    received = received_by(engine, some)
    for one in some:
        assert received[one.request_id].by_branch() == plain_of_whole[one.request_id].by_branch(), one
    stats = engine.stats()
    assert stats.num_accepted_by_source[source] > 5
    assert stats.num_preemptions > 0


def test_a_killed_engines_requests_go_on_with_other_drafts(engines, requests, plain, answers):
    """Tokens of a run that were sent are the checkpoint, wherever in the run the engine died."""
    rng, kinds = random.Random(3), list(DRAFTERS.values())
    for one in requests:
        if one.sampling.ranks_branches:
            continue
        branches = [answers[one.request_id, branch] for branch in range(one.sampling.num_branches)]
        sent = [tokens[: rng.randrange(len(tokens))] for tokens in branches]
        history = tuple(BranchHistory(token_ids=tuple(tokens)) for tokens in sent)
        received = received_by(engines.make(drafter=rng.choice(kinds)(answers)), [replace(one, history=history)])
        rest = received[one.request_id].branches
        assert [before + rest[branch] for branch, before in enumerate(sent)] == branches


def test_a_wrong_draft_leaves_no_slot_behind_at_any_offset_of_a_block(engines):
    """After a run that crosses blocks, single tokens follow across the same border."""
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    for length in range(3, 11):
        request = EngineRequest(request_id="a", prompt=tuple(range(40, 40 + length)), sampling=sampling)
        wanted = received_by(engines.make(), [request])["a"].branches[0]
        for right in (0, 3):
            drafter = KnowingDrafter({("a", 0): [*wanted[: 2 + right], *(5,) * 30]})
            drafter.of = lambda one, count, own=drafter.of: own(one, count) if one.num_output_tokens == 2 else ()
            assert received_by(engines.make(drafter=drafter), [request])["a"].branches[0] == wanted


def test_forced_tokens_take_fewer_steps(engines):
    grammar = choice_grammar(["the little fox went to the big old house"])
    request = EngineRequest(
        request_id="a", prompt=(5, 6, 7), sampling=SamplingParams(max_tokens=40, temperature=0.8, grammar=grammar)
    )
    engine = engines.make(drafter=OutOfRangeDrafter())
    received = received_by(engine, [request])
    assert received["a"].branches == received_by(engines.make(), [request])["a"].branches
    assert engine.stats().num_accepted_by_source[0] > 4
    assert engine.stats().num_steps < len(received["a"].branches[0])
