"""n, best_of and beam search on the demo model, on cached keys that are forked and copied, against the model asked the
plain way: every token of a sequence computed again for each next one."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import BeamSearch, SamplingParams
from service.engine.request import EngineRequest
from service.errors import EndReason
from tests.fakes.plain_model import PlainModel
from tests.support.beam_reference import search
from tests.support.demo_engine import TWO_LAYERS, DemoEngines
from tests.support.received import run_steps
from tests.unit.service.engine.execution.test_executor import AheadOps

FLOAT32 = np.dtype(np.float32)
PROMPT = [*range(40, 51)]


@pytest.fixture(scope="module", params=[NumpyOps, AheadOps])
def engine_of(request):
    """An idle engine of these sizes, the same one each time: to capture its steps on NumPy takes a while."""
    return cache(DemoEngines(request.param(FLOAT32), num_layers=TWO_LAYERS).make)


@pytest.fixture(scope="module")
def plain():
    engines = DemoEngines(NumpyOps(FLOAT32), num_layers=TWO_LAYERS)
    return PlainModel(engines.model, engines.eos_token_ids)


def run(engine, prompt=PROMPT, history=(), **params):
    sampling = SamplingParams(**params)
    engine.add_request(EngineRequest(request_id="a", prompt=tuple(prompt), sampling=sampling, history=history))
    return run_steps(engine)["a"]


@pytest.fixture(scope="module")
def plain_engine():
    return DemoEngines(NumpyOps(FLOAT32)).make(max_num_seqs=64, num_blocks=300)


SAMPLED = (
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 2**63, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 6, "min_tokens": 9, "logit_bias": ((300, 6.0), (1, 9.0))},
    {"temperature": 0.0},
)


@pytest.mark.parametrize(("params", "num_prompt"), [(SAMPLED[0], 1), (SAMPLED[0], 8), *((w, 11) for w in SAMPLED)])
def test_branches_of_one_seed_are_the_streams_of_that_seed(engine_of, plain, params, num_prompt):
    params, prompt = {"max_tokens": 10, "n": 4, "best_of": 4} | params, PROMPT[:num_prompt]
    received = run(engine_of(max_num_seqs=4), prompt, **params)
    assert received.branches == {k: plain.sample(prompt, SamplingParams(**params), k) for k in range(4)}


def beams_of(plain, prompt, params):
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else plain.eos_token_ids)
    answers = search(prompt, params, stops, lambda tokens: plain.logprobs(tokens, params, len(prompt)).tolist())
    return [tokens for tokens, _, _ in answers[: params.n]]


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, -2.0])
def test_beams_match_the_reference(engine_of, plain, width, early_stopping, length_penalty):
    beam = BeamSearch(width=width, early_stopping=early_stopping, length_penalty=length_penalty)
    params = {"beam": beam, "n": width, "max_tokens": 7, "stop_token_ids": (13, 260, 262, 300)}
    received = run(engine_of(max_num_seqs=16, num_blocks=120), **params)
    wanted = beams_of(plain, PROMPT, SamplingParams(**params))
    assert [received.branches[branch] for branch in range(width)] == wanted


SHAPED = (
    {"presence_penalty": 1.0, "repetition_penalty": 1.4},
    {"frequency_penalty": 1.5},
    {"logit_bias": ((300, 7.0), (262, -50.0))},
    {"min_tokens": 5, "logit_bias": ((1, 20.0),)},
)


@pytest.mark.parametrize("shape", SHAPED, ids=str)
def test_what_shapes_a_sample_shapes_a_beam(engine_of, plain, shape):
    """Next to requests of other kinds, whose log-probabilities are of the raw logits."""
    params = {"beam": BeamSearch(width=4), "n": 4, "max_tokens": 8, **shape}
    other = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "n": 2, "best_of": 2, "logprobs": 2, "ignore_eos": True}
    engine = engine_of(max_num_seqs=7)
    engine.add_request(EngineRequest(request_id="other", prompt=tuple(PROMPT), sampling=SamplingParams(**other)))
    engine.add_request(EngineRequest(request_id="a", prompt=tuple(PROMPT), sampling=SamplingParams(**params)))
    received = run_steps(engine)
    found = [received["a"].branches[branch] for branch in range(4)]
    assert found == beams_of(plain, PROMPT, SamplingParams(**params))
    for branch in range(2):
        output = received["other"].branches[branch]
        assert output == plain.sample(PROMPT, SamplingParams(**other), branch)
        for at, one in enumerate(received["other"].logprobs[branch]):
            raw = plain.logprobs([*PROMPT, *output[:at]], SamplingParams(max_tokens=1), len(PROMPT))
            np.testing.assert_allclose(one.logprob, raw[output[at]], atol=1e-4)


POOLS = (
    {"budget": 9},
    {"block_size": 16, "prefix_caching": True},
    {"block_size": 32},
    {"num_blocks": 13},
    {"num_blocks": 13, "prefix_caching": True},
)


@pytest.mark.parametrize("sizes", POOLS, ids=str)
def test_all_kinds_together_in_any_pool(engine_of, plain, sizes):
    params = {
        "sampled": {"temperature": 1.0, "seed": 21, "n": 3, "best_of": 3, "max_tokens": 22, "ignore_eos": True},
        "beams": {"beam": BeamSearch(width=3), "n": 3, "max_tokens": 12, "ignore_eos": True},
        "single": {"temperature": 1.0, "seed": 22, "max_tokens": 22, "ignore_eos": True, "presence_penalty": 1.0},
    }
    engine = engine_of(max_num_seqs=7, **sizes)
    for name, wish in params.items():
        engine.add_request(EngineRequest(request_id=name, prompt=tuple(PROMPT), sampling=SamplingParams(**wish)))
    received = run_steps(engine)
    sampling = {name: SamplingParams(**wish) for name, wish in params.items()}
    assert received["sampled"].branches == {k: plain.sample(PROMPT, sampling["sampled"], k) for k in range(3)}
    assert received["single"].branches == {0: plain.sample(PROMPT, sampling["single"], 0)}
    assert list(received["beams"].branches.values()) == beams_of(plain, PROMPT, sampling["beams"])
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in sizes)
    assert engine.stats().num_blocks_used == 0


RESUMED = (
    {"temperature": 1.0, "seed": 31, "n": 4, "best_of": 4},
    {"temperature": 1.0, "seed": 32, "n": 1, "best_of": 3, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 1, "presence_penalty": 0.5},
)


@pytest.mark.parametrize("params", RESUMED, ids=str)
def test_taken_up_in_the_middle_it_goes_on_as_if_nothing_had_been(engine_of, params):
    params = {"max_tokens": 8, **params}
    whole = run(engine_of(max_num_seqs=4), **params)
    for num_steps in (2, 3, 5, 8):
        engine = engine_of(max_num_seqs=4)
        engine.add_request(EngineRequest(request_id="a", prompt=tuple(PROMPT), sampling=SamplingParams(**params)))
        received = run_steps(engine, num_steps=num_steps)
        engine.cancel_all(EndReason.CANCELLED)
        while engine.has_work:
            engine.step()
        engine.drain_request_outputs()
        history = received["a"].history(len(whole.branches))
        engine.add_request(
            EngineRequest(request_id="a", prompt=tuple(PROMPT), sampling=SamplingParams(**params), history=history)
        )
        received = run_steps(engine, received)["a"]
        assert received.by_branch() == whole.by_branch()
        assert (received.end, received.choices, received.num_output_tokens) == (
            whole.end,
            whole.choices,
            whole.num_output_tokens,
        )
        for branch, logprobs in whole.logprobs.items():
            assert [one.top_ids for one in received.logprobs[branch]] == [one.top_ids for one in logprobs]
            ours, theirs = ([one.logprob for one in these] for these in (received.logprobs[branch], logprobs))
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


GOLDENS = json.loads((Path(__file__).parent / "goldens" / "beams.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_beams_match_transformers(plain_engine, width, early_stopping):
    """See tests/support/make_beam_goldens.py. Its end of sequence is any of some tokens, as our stop ids are."""
    goldens = [one for one in GOLDENS if (one["width"], one["early_stopping"]) == (width, early_stopping)]
    assert len(goldens) == 6
    for number, golden in enumerate(goldens):
        beam = BeamSearch(width=width, early_stopping=early_stopping, length_penalty=golden["length_penalty"])
        sampling = SamplingParams(
            beam=beam, n=width, max_tokens=golden["max_tokens"], stop_token_ids=tuple(golden["stops"]), ignore_eos=True
        )
        plain_engine.add_request(
            EngineRequest(request_id=str(number), prompt=tuple(golden["prompt"]), sampling=sampling)
        )
    received = run_steps(plain_engine)
    for number, golden in enumerate(goldens):
        assert [received[str(number)].branches[branch] for branch in range(width)] == golden["answers"]


ADJUSTED = json.loads((Path(__file__).parent / "goldens" / "adjusted_beams.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("adjustment", sorted({json.dumps(one["adjustment"]) for one in ADJUSTED}))
def test_adjusted_beams_match_transformers(plain_engine, adjustment):
    """min_tokens, logit_bias and repetition_penalty apply to log-probabilities, after the softmax."""
    adjustment = json.loads(adjustment)
    goldens = [one for one in ADJUSTED if one["adjustment"] == adjustment]
    assert len(goldens) == 8
    bias = tuple((int(token), value) for token, value in adjustment.get("logit_bias", {}).items())
    for number, golden in enumerate(goldens):
        sampling = SamplingParams(
            beam=BeamSearch(width=golden["width"], early_stopping=golden["early_stopping"]),
            n=golden["width"],
            max_tokens=golden["max_tokens"],
            stop_token_ids=tuple(golden["stops"]),
            ignore_eos=True,
            **{**adjustment, "logit_bias": bias},
        )
        plain_engine.add_request(
            EngineRequest(request_id=str(number), prompt=tuple(golden["prompt"]), sampling=sampling)
        )
    received = run_steps(plain_engine)
    for number, golden in enumerate(goldens):
        found = received[str(number)]
        assert [found.branches[branch] for branch in range(golden["width"])] == golden["answers"]
