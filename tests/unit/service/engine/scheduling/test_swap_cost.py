"""Rates of prompts and copies that a start measures."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from model.kv_cache import allocate
from model.ops.cpu.ops import NumpyOps
from service.engine.scheduling import swap_cost
from service.engine.scheduling.swap_cost import CALIBRATION_BLOCKS, CALIBRATION_TOKENS, measure_rates
from tests.support.demo_engine import BLOCK_SIZE, MAX_LEN, DemoEngines


@pytest.mark.parametrize(("longest", "lengths"), [(8192, [CALIBRATION_TOKENS]), (256, [256] * 8), (300, [300] * 6)])
def test_short_prompts_are_timed_in_larger_numbers(monkeypatch, longest, lengths):
    """Fewer take the host longer to launch than the device to compute, and say nothing."""
    timed = []
    monkeypatch.setattr(swap_cost, "_run_prompts", lambda model, kv, lengths: timed.append(lengths.tolist()))
    monkeypatch.setattr(swap_cost, "_best_s", lambda work: work() or 3.0)
    shape = {"num_layers": 2, "num_heads": 4, "head_dim": 8, "vocab_size": 10, "hidden_size": 32}
    config = SimpleNamespace(**shape, num_active_parameters=2048, tied_embeddings=True)
    token_s, pair_s = swap_cost._prompt_rates(SimpleNamespace(config=config), None, longest)
    assert timed == [lengths]
    assert pair_s / token_s == pytest.approx(2 * (4 * 2 * 4 * 8) / (2 * (2048 - 320)))
    assert sum(length * token_s + length**2 / 2 * pair_s for length in lengths) == pytest.approx(3.0)


def test_the_demo_model_is_timed_as_it_is():
    ops = NumpyOps(np.dtype(np.float32))
    model = DemoEngines(ops).model
    kv = allocate(ops, model.config, CALIBRATION_BLOCKS, BLOCK_SIZE)
    rates = measure_rates(model, kv, ops.host_blocks(kv, CALIBRATION_BLOCKS), MAX_LEN)
    assert 0 < rates.pair_s < rates.token_s < 1
    assert 0 < rates.transfer_s < 1
    assert 0 < rates.block_out_s < 1
    assert 0 < rates.block_in_s < 1
