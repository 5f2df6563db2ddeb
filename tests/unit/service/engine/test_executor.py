"""The executor on the demo model: one step ahead and on captured batch sizes it says what it says step by step."""

from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.kv_cache import allocate
from model.loader import load_model
from model.ops.numpy_ops import NumpyOps
from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.executor import ModelExecutor
from service.engine.kv_manager import KVManager
from service.engine.scheduler import Limits
from service.engine.sequence import Request

DEMO = Path(__file__).parents[4] / "model" / "demo"
MAX_LEN = 160
FLOAT32 = np.dtype(np.float32)


class AheadOps(NumpyOps):
    """NumPy in the GPU's place: the executor runs ahead and uses its captured sizes."""

    name = "cuda"


@pytest.fixture(scope="module", params=[NumpyOps, AheadOps])
def make_engine(request):
    config = ModelConfig.read(DEMO)
    model = load_model(DEMO, config, request.param(FLOAT32), MAX_LEN)

    def make(num_blocks=200, budget=64):
        executor = ModelExecutor(model, frozenset(config.eos_token_ids), 6, MAX_LEN // 8)
        executor.attach(allocate(model.ops, config, num_blocks, 8))
        assert executor.runs_ahead == (model.ops.name == "cuda")
        limits = Limits(max_num_seqs=6, max_num_batched_tokens=budget, max_model_len=MAX_LEN)
        return Engine(executor, KVManager(num_blocks, 8), limits, frozenset(config.eos_token_ids))

    return make


def run(engine, wishes):
    prompts = [tuple(range(5 + n, 25 + 4 * n)) for n in range(len(wishes))]
    for n, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        engine.add(Request(request_id=str(n), prompt=prompt, sampling=SamplingParams(**{"max_tokens": 24} | wish)))
    told = {}
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.take_outputs():
            tokens, logprobs = told.setdefault(output.request_id, ([], []))
            tokens += output.token_ids
            logprobs += output.logprobs
    return told


WISHES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 8, "top_k": 20, "logprobs": 3},
    {"temperature": 0.8, "seed": 9, "min_tokens": 12, "logit_bias": ((300, 5.0),)},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.5, "seed": 10, "min_p": 0.1},
    {"temperature": 0.0, "max_tokens": 1},
]


@pytest.fixture(scope="module")
def alone():
    """Each request by itself, in step, on the plain path."""
    config = ModelConfig.read(DEMO)
    model = load_model(DEMO, config, NumpyOps(FLOAT32), MAX_LEN)
    told = {}
    for n in range(len(WISHES)):
        executor = ModelExecutor(model, frozenset(config.eos_token_ids), 1, MAX_LEN // 8)
        executor.attach(allocate(model.ops, config, 40, 8))
        limits = Limits(max_num_seqs=1, max_num_batched_tokens=256, max_model_len=MAX_LEN)
        engine = Engine(executor, KVManager(40, 8), limits, frozenset(config.eos_token_ids))
        prompt = tuple(range(5 + n, 25 + 4 * n))
        wishes = SamplingParams(**{"max_tokens": 24} | WISHES[n])
        engine.add(Request(request_id=str(n), prompt=prompt, sampling=wishes))
        outputs = []
        while engine.has_work:
            engine.step()
            outputs += engine.take_outputs()
        told[str(n)] = [token for output in outputs for token in output.token_ids]
    return told


@pytest.mark.parametrize("budget", [64, 16])
def test_together_as_alone(make_engine, alone, budget):
    told = run(make_engine(budget=budget), WISHES)
    assert {name: tokens for name, (tokens, _) in told.items()} == alone
    assert [len(told[name][1]) for name in "35"] == [len(told[name][0]) for name in "35"]
    assert all(len(logprob.top_ids) == 3 for logprob in told["3"][1])


def test_preempted_as_alone(make_engine, alone):
    engine = make_engine(num_blocks=22)
    told = run(engine, WISHES)
    assert engine.stats().num_preemptions > 0
    assert {name: tokens for name, (tokens, _) in told.items()} == alone


def test_penalties_see_every_token(make_engine):
    wishes = [{"temperature": 0.0, "frequency_penalty": 2.0, "ignore_eos": True}] * 2
    together = run(make_engine(), wishes)
    assert len(set(together["0"][0])) > len(together["0"][0]) * 0.6
