"""Work of an engine on a GPU before it serves."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.cuda_graphs import StepGraphs
from model.kv_cache import allocate
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from service.engine.kv.warm_up import WarmUpSizes, run_all_kernels, warm_up, warm_up_products
from tests.support.demo_engine import DEMO

SIZES = WarmUpSizes(block_size=16, num_tokens=700, num_sequences=3, max_model_len=128, verifies_drafts=True)


class MeetingOps(NumpyOps):
    """Operations with given product sizes, which record the products that run."""

    def __init__(self):
        super().__init__(np.dtype(np.float32))
        self.met = []

    def linear_sizes(self, most):
        return [size for size in (2, 4, 576, 640, 1024) if size // 2 < most]

    def temporary(self, shape, dtype):
        return np.full(shape, np.inf, dtype)  # computing with undefined memory warns

    def linear(self, x, weight, bias=None, **how):
        self.met.append((len(x), weight.shape[0]))
        return super().linear(x, weight, bias, **how)


def test_products_of_every_size_that_is_not_captured_are_met_before_an_engine_serves():
    ops = MeetingOps()
    model = load_model(DEMO, ModelConfig.read(DEMO), ops, 128)
    warm_up_products(model, SIZES)
    width, vocab = model.weights.layers[0].down.shape[0], model.config.vocab_size
    in_layers = [rows for rows, num_outputs in ops.met if num_outputs == width]
    assert in_layers == [576] * 4 + [640] * 4 + [700] * 4  # once in two layers, each with two products so wide
    assert [rows for rows, num_outputs in ops.met if num_outputs == vocab and rows < 5][-2:] == [2, 4]


class IdleOps(MeetingOps):
    """Computes nothing."""

    def temporary(self, shape, dtype):
        return np.zeros(shape, dtype)

    def linear(self, x, weight, bias=None, *, dtype=None, out=None):
        self.met.append((len(x), weight.shape, dtype))
        return np.zeros((len(x), weight.shape[0]), np.float32)

    def paged_decode_attention(self, q, batch, out):
        self.met.append(("decode", len(q)))

    def paged_prefill_attention(self, q, batch, out):
        self.met.append(("prefill", len(q), batch.max_query_len))

    def sample(self, logits, how, out=None):
        self.met.append(("sample", len(logits)))

    def tune_linear(self, weights, bias, num_rows, *, dtype=None):
        self.met.append(("tune", weights[0].shape, *num_rows))


def test_warm_up_compiles_the_kernels_that_run_later():
    """An engine compiles what `run_all_kernels` runs before its weights are read."""
    ops = IdleOps()
    model = load_model(DEMO, ModelConfig.read(DEMO), ops, 128)
    run_all_kernels(model.first_layer(), SIZES)
    ahead, ops.met = set(ops.met), []
    warm_up(model, SIZES)
    warm_up_products(model, SIZES)
    graphs = StepGraphs(model, np.zeros(3, np.int32), 3, 8, verifies_drafts=True)
    graphs.capture(allocate(ops, model.config, 4, 16))
    assert len(ahead) > 70
    assert set(ops.met) == ahead
