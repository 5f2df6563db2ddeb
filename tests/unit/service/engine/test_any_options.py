"""Requests that combine the options at random, together in a pool that is too small for them, against each alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import BeamSearch, ReasoningBudget, SamplingParams, TokenRules
from model.text.grammar import choice_grammar, regex_grammar
from model.text.tokenizer import Tokenizer
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from service.engine.request import AdapterSource, EngineRequest
from service.engine.step import TokenLogprob
from tests.fakes.drafters import LyingDrafter
from tests.support.adapters import source_of, write_adapter
from tests.support.demo_engine import DEMO, TWO_LAYERS, DemoEngines
from tests.support.received import Received, run_steps
from tests.support.rowwise_ops import RowwiseAheadOps, RowwiseOps
from tests.unit.service.engine.execution.test_executor import FLOAT32, AheadOps

SEEDS = range(6)
FP8_SEEDS = (2, 5)
LORA_SEEDS = (1,)
NUM_REQUESTS = 9
CAT = tuple(Tokenizer.read(DEMO).encode(" cat", add_special_tokens=False))
OPTIONS = {
    "temperature": (0.0,),
    "top_k": (1, 40),
    "top_p": (0.3, 0.9),
    "min_p": (0.1,),
    "repetition_penalty": (1.3, 0.8),
    "frequency_penalty": (0.7,),
    "min_tokens": (5,),
    "ignore_eos": (True,),
    "stop_token_ids": ((262, 16), tuple(range(300, 340))),
    "logit_bias": (((300, 4.0), (262, -100.0)),),
    "logprobs": (0, 3, 20),
    "prompt_logprobs": (0, 2),
    "grammar": (regex_grammar("[a-z ]{5,40}"), choice_grammar(["yes", "no", "the cat", "the cat sat"])),
    "rules": (
        TokenRules(bad_words=((300,), (262, 16))),
        TokenRules(allowed_token_ids=tuple(range(200, 900))),
        TokenRules(reasoning=ReasoningBudget(max_tokens=3, start="<", end="cat", end_ids=CAT, is_open=True)),
    ),
}
DRAFTERS = (
    lambda: None,
    lambda: NgramDrafter(1, 3),
    lambda: SuffixDrafter(max_depth=24, max_requests=50, max_spec_factor=2.0, min_token_prob=0.1),
    LyingDrafter,
)
"""An engine's drafter, by seed; odd seeds run ahead."""
BRANCHES = (
    {},
    {"n": 3, "best_of": 3},
    {"n": 2, "best_of": 4},
    {"beam": BeamSearch(width=4, early_stopping="never"), "n": 3},
    {"beam": BeamSearch(width=3, length_penalty=0.0), "n": 1},
)


@pytest.fixture(scope="module")
def steady():
    return DemoEngines(NumpyOps(FLOAT32), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def adapters(steady, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("adapters"), steady.model.config
    written = [write_adapter(folder / f"r{rank}", config, rank=rank, seed=rank, strength=2.0) for rank in (8, 64)]
    return [source_of(one, config, FLOAT32) for one in written]


@pytest.fixture(scope="module")
def ahead():
    return DemoEngines(AheadOps(FLOAT32), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def fp8_steady():
    return DemoEngines(RowwiseOps(), "fp8", num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def fp8_ahead():
    return DemoEngines(RowwiseAheadOps(), "fp8", num_layers=TWO_LAYERS)


def drawn_requests(seed: int, adapters: Sequence[AdapterSource] = ()) -> list[EngineRequest]:
    """Return requests of two tenants; most share a prefix. With `adapters`, two of three requests have one."""
    rng = random.Random(seed)
    requests = []
    for number in range(NUM_REQUESTS):
        params = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < 0.4}
        params |= rng.choice(BRANCHES)
        prompt = (*range(100, 100 + rng.choice((8, 17, 24, 40))), *(rng.randrange(5, 60) for _ in range(9)))
        sampling = SamplingParams(max_tokens=rng.randrange(6, 24), seed=rng.getrandbits(63), **params)
        tenant = rng.choice(("one", "other"))
        request = EngineRequest(
            request_id=str(number),
            prompt=prompt,
            sampling=sampling,
            tenant=tenant,
            cache_salt=tenant,
            adapter=rng.choice((None, *adapters)) if adapters else None,
        )
        requests.append(request)
    return requests


def received_in_need(engine, requests: list[EngineRequest], rng: random.Random) -> dict[str, Received]:
    """Requests arrive while others run, and some are preempted."""
    scheduler, waiting, received = engine._scheduler, list(requests), {}
    while waiting or engine.has_work:
        if waiting:
            engine.add_request(waiting.pop())
        run_steps(engine, received, num_steps=rng.randrange(1, 4))
        if engine.running and rng.random() < 0.15:
            group = scheduler.preemption._next_victim(scheduler.running)
            scheduler.preemption._preempt(group, scheduler.running)
            scheduler._requeue([group])
    return received


def numbers(logprobs: list[TokenLogprob]) -> list[float]:
    return [number for one in logprobs for number in (one.logprob, *one.top_logprobs)]


def mean_logprobs(received: Received, request: EngineRequest) -> list[float]:
    """Return the tokens that the answering branches emitted; the first branch also has the prompt's."""
    num_received = 0 if request.sampling.prompt_logprobs is None else len(request.prompt) - 1
    own = [received.logprobs[branch][num_received if branch == 0 else 0 :] for branch in received.choices]
    return [np.mean([one.logprob for one in logprobs]) for logprobs in own]


def check_together_in_need_as_alone(
    engines: DemoEngines, steady: DemoEngines, seed: int, atol: float, adapters: Sequence[AdapterSource] = ()
) -> None:
    requests, rng = drawn_requests(seed, adapters), random.Random(seed)
    engine = engines.make(
        num_blocks=40 * 8 // (8, 16, 32)[seed % 3],
        block_size=(8, 16, 32)[seed % 3],
        budget=rng.choice((7, 16, 64)),
        max_num_seqs=9,
        prefix_caching=seed % 4 != 3,
        num_host_blocks=(0, 12, 60)[seed // 2],
        poisons=True,
        num_adapter_slots=seed % 2 + 1 if adapters else 0,
        drafter=DRAFTERS[seed % len(DRAFTERS)](),
    )
    received = received_in_need(engine, requests, rng)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_blocks_used == 0
    for request in requests:
        alone = steady.make(budget=256, num_adapter_slots=int(bool(adapters)))
        alone.add_request(replace(request, tenant=""))
        wanted, got = run_steps(alone)[request.request_id], received[request.request_id]
        assert got.by_branch() == wanted.by_branch(), request
        assert (got.end, got.num_output_tokens) == (wanted.end, wanted.num_output_tokens), request
        if request.sampling.ranks_branches:  # equals may be in any order
            np.testing.assert_allclose(mean_logprobs(got, request), mean_logprobs(wanted, request), atol=atol)
        else:
            assert got.choices == wanted.choices
        for branch, logprobs in wanted.logprobs.items():
            np.testing.assert_allclose(numbers(got.logprobs[branch]), numbers(logprobs), atol=atol)


@pytest.mark.parametrize("seed", SEEDS)
def test_together_in_need_as_alone(steady, ahead, seed):
    check_together_in_need_as_alone((steady, ahead)[seed % 2], steady, seed, 2e-4)


@pytest.mark.parametrize("seed", FP8_SEEDS)
def test_with_fp8_weights_and_cache(fp8_steady, fp8_ahead, seed):
    """Bit by bit, each row by itself: every block holds what its own sequence wrote."""
    check_together_in_need_as_alone((fp8_steady, fp8_ahead)[seed % 2], fp8_steady, seed, 0)


@pytest.mark.parametrize("seed", LORA_SEEDS)
def test_with_adapters(steady, ahead, adapters, seed):
    check_together_in_need_as_alone((steady, ahead)[seed % 2], steady, seed, 2e-4, adapters)


def test_every_pair_of_options_is_requested_together():
    asked = [request.sampling for seed in SEEDS for request in drawn_requests(seed)]
    neutral = SamplingParams(max_tokens=1)
    for two in combinations([*OPTIONS, "beam", "n"], 2):
        assert any(all(getattr(one, name) != getattr(neutral, name) for name in two) for one in asked), two
