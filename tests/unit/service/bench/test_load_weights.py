"""Weights written, read and loaded: on the CPU, of the demo model's shape."""

import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from model.config import ModelConfig
from model.ops.cpu.ops import NumpyOps
from service.bench.report import python_script, script_environment
from service.errors import StartupError
from tests.bench import load_weights
from tests.bench.load_weights import measure, write_weights
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


def test_no_room_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    with pytest.raises(StartupError, match=r"--folder: the weights take 0\.0 GB, .* has 0\.0 left"):
        write_weights(tmp_path, ModelConfig.read(DEMO), np.dtype(np.float32))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_whole_are_none(tmp_path, monkeypatch):
    def broken_off(work, pieces):
        raise KeyboardInterrupt

    monkeypatch.setattr(load_weights, "_in_threads", broken_off)
    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path, ModelConfig.read(DEMO), np.dtype(np.float32))
    assert not (tmp_path / "model.safetensors").exists()


def test_a_wrong_word_is_one_line(tmp_path):
    words = ("--model-config", "gpt-5", "--folder", str(tmp_path))
    command = python_script("load_weights", *words, package="tests.bench")
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("load_weights: --model-config: 'gpt-5' is ")
    assert "llama-3.1-8b," in line


def test_a_file_that_has_left_the_page_cache(tmp_path):
    config, ops = ModelConfig.read(DEMO), NumpyOps(np.dtype(np.float32))
    write_weights(tmp_path, config, ops.dtype)
    figures = measure(tmp_path, config, ops, is_cold=True)
    assert figures.is_cold
    assert figures.load_share == min(figures.read_s, figures.uncached_read_s or figures.read_s) / figures.load_s
