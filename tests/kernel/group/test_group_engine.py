"""The whole engine on a group of GPUs: graphs, sampling by parts, swap, branches and grammars give NumPy's tokens."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.text.grammar import regex_grammar
from service.engine.request import EngineRequest
from tests.support.demo_engine import DemoEngines, run_all
from tests.support.received import run_steps

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]  # ranks on one card wait 4 s for one another

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "n": 3, "best_of": 3},
    {"temperature": 0.8, "grammar": regex_grammar("[a-z ]{5,20}")},
    {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "logprobs": 3, "prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def engines(open_group):
    return DemoEngines(open_group("float32"))


@pytest.fixture(scope="module")
def on_numpy():
    """Return NumPy's answers: (of all requests, of KINDS)."""
    made = DemoEngines(NumpyOps(np.dtype(np.float32)))
    return made.each_alone(), branches_of(made)


def branches_of(made: DemoEngines):
    """Answers of requests that begin alike, in a pool so small that sequences are preempted."""
    engine = made.make(num_blocks=16, prefix_caching=True, num_host_blocks=40)
    for number, params in enumerate(KINDS):
        sampling = SamplingParams(max_tokens=18, ignore_eos=True, seed=number, **params)
        prompt = (*range(40, 69), 100 + number)
        engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
    received = {name: each.branches for name, each in run_steps(engine).items()}
    assert engine.stats().num_preemptions > 0
    return received


@pytest.mark.parametrize("sizes", [{}, {"budget": 16}, {"num_blocks": 22}], ids=str)
def test_every_request_gets_the_same_tokens(engines, on_numpy, sizes):
    received = run_all(engines.make(**sizes))
    assert {name: tokens for name, (tokens, _) in received.items()} == on_numpy[0]


def test_prefixes_swap_branches_and_grammars(engines, on_numpy):
    assert branches_of(engines) == on_numpy[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_with_an_fp8_cache(open_group, dtype):
    """Ranks agree to the bit, or a download raises; the same again gives the same."""
    made = DemoEngines(open_group(dtype, np.dtype(np.uint8)))
    first, again = (run_all(made.make(prefix_caching=True)) for _ in range(2))
    assert first == again
    assert all(tokens for tokens, _ in first.values())
