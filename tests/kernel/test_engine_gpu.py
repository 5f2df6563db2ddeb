"""The whole engine on the device, a step ahead and on captured graphs, against the same engine on NumPy."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import BeamSearch, SamplingParams
from model.text.grammar import json_grammar, regex_grammar
from service.engine.request import EngineRequest
from tests.support.demo_engine import DemoEngines, run_all
from tests.support.received import run_steps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engines(open_ops):
    return DemoEngines(open_ops("float32"))


@pytest.fixture(scope="module")
def on_numpy():
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


@pytest.mark.parametrize("sizes", [{}, {"budget": 16}, {"num_blocks": 22}], ids=str)
def test_every_request_gets_the_same_tokens(engines, on_numpy, sizes):
    engine = engines.make(**sizes)
    received = run_all(engine)
    assert {name: tokens for name, (tokens, _) in received.items()} == on_numpy.each_alone()
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in sizes)


def test_logprobs_agree(engines, on_numpy):
    ours, theirs = (run_all(made.make())["3"][1] for made in (engines, on_numpy))
    np.testing.assert_allclose([one.logprob for one in ours], [one.logprob for one in theirs], atol=1e-4)
    assert [one.top_ids for one in ours] == [one.top_ids for one in theirs]


def test_penalties_wait_for_the_tokens_they_count(engines, on_numpy):
    options = [{"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2, "ignore_eos": True}] * 3
    assert run_all(engines.make(), options) == run_all(on_numpy.make(), options)


BRANCHES = {
    "sampled": {"temperature": 1.0, "seed": 41, "n": 4, "best_of": 4, "max_tokens": 30, "ignore_eos": True},
    "penalised": {"temperature": 1.0, "seed": 42, "n": 2, "best_of": 3, "max_tokens": 12, "presence_penalty": 1.0},
    "beams": {"beam": BeamSearch(width=4), "n": 4, "max_tokens": 20},
    "shaped beams": {"beam": BeamSearch(width=3, early_stopping=True), "n": 3, "max_tokens": 12, "min_tokens": 4},
}


@pytest.mark.parametrize(
    "sizes", [{}, {"block_size": 16, "prefix_caching": True}, {"block_size": 32}, {"num_blocks": 22}], ids=str
)
def test_branches_and_beams_are_the_same(engines, on_numpy, sizes):
    """Forked in captured steps and by themselves, copied, preempted."""
    received = {}
    for made, own in ((engines, sizes), (on_numpy, {})):
        engine = made.make(max_num_seqs=14, **own)
        for name, options in BRANCHES.items():
            engine.add_request(
                EngineRequest(request_id=name, prompt=tuple(range(40, 51)), sampling=SamplingParams(**options))
            )
        received[made] = {name: (one.by_branch(), one.choices) for name, one in run_steps(engine).items()}
        assert engine.stats().num_block_copies > 0
        assert (engine.stats().num_preemptions > 0) == ("num_blocks" in own)
    assert received[engines] == received[on_numpy]


COUNTS = json_grammar({"type": "object", "additionalProperties": {"type": "integer"}})
GRAMMARS = [
    {"grammar": COUNTS, "temperature": 1.0, "seed": 5},
    {"grammar": regex_grammar("[a-z ]{30,40}"), "temperature": 0.0, "frequency_penalty": 1.0, "max_tokens": 40},
    {"temperature": 1.0, "seed": 6, "max_tokens": 40},
    {
        "grammar": regex_grammar("[0-9]{3,9}(,[0-9]{2}){2}"),
        "temperature": 1.0,
        "seed": 7,
        "logprobs": 2,
        "max_tokens": 60,
    },
]


def test_grammars_allow_the_same(engines, on_numpy):
    """Masks are built during captured steps that run ahead; other sequences of the batch have none."""
    ours, theirs = (run_all(made.make(), GRAMMARS) for made in (engines, on_numpy))
    assert {name: received[0] for name, received in ours.items()} == {
        name: received[0] for name, received in theirs.items()
    }


def test_prompts_are_scored_alike(engines, on_numpy):
    options = [{"prompt_logprobs": 3, "logprobs": 3, "max_tokens": 4, "temperature": 0.0}] * 4
    ours, theirs = (run_all(made.make(budget=24), options) for made in (engines, on_numpy))
    for name, (tokens, logprobs) in theirs.items():
        assert ours[name][0] == tokens
        np.testing.assert_allclose(
            [one.logprob for one in ours[name][1]], [one.logprob for one in logprobs], rtol=1e-4, atol=1e-4
        )
        assert [one.top_ids for one in ours[name][1]] == [one.top_ids for one in logprobs]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_prompts_are_pooled_alike(engines, on_numpy, pooling):
    """Chunk by chunk, while others decode."""
    options = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling)
    vectors = []
    for made in (engines, on_numpy):
        engine = made.make(budget=24)
        engine.add_request(EngineRequest(request_id="other", prompt=(5, 6, 7), sampling=SamplingParams(max_tokens=30)))
        for length in (1, 16, 25, 100):
            prompt = tuple(range(40, 40 + length))
            engine.add_request(EngineRequest(request_id=str(length), prompt=prompt, sampling=options))
        received = {}
        while engine.has_work:
            engine.step()
            received |= {
                output.request_id: output.embedding for output in engine.drain_request_outputs() if output.embedding
            }
        vectors.append({name: np.frombuffer(data, np.float32) for name, data in sorted(received.items())})
    ours, theirs = vectors
    assert list(ours) == list(theirs) == ["1", "100", "16", "25"]
    for name, vector in theirs.items():
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
        np.testing.assert_allclose(ours[name], vector, atol=1e-4)
