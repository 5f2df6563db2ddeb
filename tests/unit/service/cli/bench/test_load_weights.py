"""Weights written, read and loaded: on the CPU, of the demo model's shape."""

import numpy as np

from model.config import ModelConfig
from model.ops.numpy_ops import NumpyOps
from service.cli.bench.load_weights import measure, write_weights
from tests.support.demo_engine import DEMO


def test_what_is_written_is_a_model_that_loads(tmp_path):
    config, ops = ModelConfig.read(DEMO), NumpyOps(np.dtype(np.float32))
    write_weights(tmp_path, config, ops.dtype)
    figures = measure(tmp_path, config, ops)
    assert figures.num_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert figures.load_s > 0
    assert figures.load_share == figures.read_s / figures.load_s
    assert figures.load_gb_per_s == figures.num_bytes / figures.load_s / 1e9
    assert figures.possible_share == max(figures.read_s, figures.hand_over_s) / figures.load_s
    assert figures.uncached_read_s is None


def test_a_file_that_has_left_the_page_cache(tmp_path):
    config, ops = ModelConfig.read(DEMO), NumpyOps(np.dtype(np.float32))
    write_weights(tmp_path, config, ops.dtype)
    figures = measure(tmp_path, config, ops, is_cold=True)
    assert figures.is_cold
    assert figures.load_share == min(figures.read_s, figures.uncached_read_s or figures.read_s) / figures.load_s
