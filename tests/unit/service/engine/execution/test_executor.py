"""The executor on the demo model: one step ahead and on captured batch sizes it says what it says step by step."""

import numpy as np
import pytest

from model import cuda_graphs
from model.config import ModelConfig
from model.ops.cpu.ops import NumpyOps
from tests.fakes.drafters import KnowingDrafter
from tests.support.demo_engine import DEMO, TWO_LAYERS, WISHES, DemoEngines, run_all

FLOAT32 = np.dtype(np.float32)
DEMO_VOCAB_SIZE = ModelConfig.read(DEMO).vocab_size


class AheadOps(NumpyOps):
    """NumPy in the GPU's place: the executor runs ahead and uses its captured sizes."""

    name = "cuda"

    def temporary(self, shape, dtype):
        return np.zeros(shape, dtype)  # rows of padding hold what was there, and NumPy warns of strange numbers


class SizedOps(NumpyOps):
    """Products with the head are to run in these sizes only."""

    SIZES = (3, 6, 24)

    def __init__(self, dtype):
        super().__init__(dtype)
        self.head_rows = []

    def linear_sizes(self, most):
        return list(self.SIZES)

    def linear(self, x, weight, bias=None, **how):
        if how.get("dtype") == FLOAT32 and weight.shape[0] == DEMO_VOCAB_SIZE:
            self.head_rows.append(len(x))
        return super().linear(x, weight, bias, **how)


@pytest.fixture(scope="module", params=[NumpyOps, AheadOps])
def engines(request):
    return DemoEngines(request.param(FLOAT32), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def alone():
    """Each request by itself, in step, on the plain path."""
    return DemoEngines(NumpyOps(FLOAT32), num_layers=TWO_LAYERS).each_alone()


@pytest.mark.parametrize("budget", [64, 16])
def test_together_as_alone(engines, alone, budget):
    received = run_all(engines.make(budget=budget))
    assert {name: tokens for name, (tokens, _) in received.items()} == alone
    assert [len(received[name][1]) for name in "35"] == [len(received[name][0]) for name in "35"]
    assert all(len(logprob.top_ids) == 3 for logprob in received["3"][1])


def test_drafts_are_rows_of_captured_decodes(alone, monkeypatch):
    """Right ones, wrong ones, and prompts' chunks in the same steps."""
    for name in ("CHUNK_ROWS", "CHUNK_ROWS_WITH_FEW", "CHUNK_ROWS_ALONE"):
        monkeypatch.setattr(cuda_graphs, name, (64,))

    class CountingOps(AheadOps):
        num_exact = 0

        def exact_rows(self):
            self.num_exact += 1
            return super().exact_rows()

    answers = {(name, 0): tokens for name, tokens in alone.items()}
    engines = DemoEngines(CountingOps(FLOAT32), num_layers=TWO_LAYERS)
    engine = engines.make(max_num_seqs=2, drafter=KnowingDrafter(answers, errs=True))
    num_captures = engines.model.ops.num_exact
    received = run_all(engine, WISHES[:4])
    assert {name: tokens for name, (tokens, _) in received.items()} == {name: alone[name] for name in received}
    stats, ops = engine.stats(), engines.model.ops
    assert 0 < stats.num_accepted_by_source[1] < stats.num_draft_tokens
    assert ops.num_exact > num_captures > 0


def test_preempted_as_alone(engines, alone):
    engine = engines.make(num_blocks=22)
    received = run_all(engine)
    assert engine.stats().num_preemptions > 0
    assert {name: tokens for name, (tokens, _) in received.items()} == alone


def test_penalties_see_every_token(engines):
    received = run_all(engines.make(), [{"temperature": 0.0, "frequency_penalty": 2.0, "ignore_eos": True}] * 2)
    assert len(set(received["0"][0])) > len(received["0"][0]) * 0.6


def test_the_heads_product_runs_in_the_sizes_met_at_start_alone(alone):
    """Any number of sampling sequences, and log-probabilities of prompts."""
    ops = SizedOps(FLOAT32)
    engines = DemoEngines(ops, num_layers=TWO_LAYERS)
    received = run_all(engines.make(budget=64))
    assert {name: tokens for name, (tokens, _) in received.items()} == alone
    run_all(engines.make(), [{"max_tokens": 1, "prompt_logprobs": 2}])
    assert set(ops.head_rows) <= set(SizedOps.SIZES)
    assert len(ops.head_rows) > 3
