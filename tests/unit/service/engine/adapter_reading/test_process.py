"""Adapters that a process of their own reads are as those read here; it may die, and ends with its engine."""

from __future__ import annotations

import gc
import os
import signal

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.adapter import read_adapter
from model.weights.lora.products import DOWN, GATE_UP
from service.engine.adapter_reading.process import AdapterProcess
from tests.support.adapters import write_adapter
from tests.support.demo_engine import DEMO
from tests.support.expert_adapters import FORMS, write_expert_adapter
from tests.support.goldens import FOLDER as GOLDENS
from tests.support.safetensors_bytes import save

CONFIG = ModelConfig.read(DEMO)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def process():
    reader = AdapterProcess(CONFIG, BFLOAT16, 16, num_processes=3)
    yield reader
    reader.close()


def assert_equal(adapter, expected):
    assert (adapter.digest, adapter.rank, adapter.num_bytes) == (expected.digest, expected.rank, expected.num_bytes)
    assert adapter.products.keys() == expected.products.keys()
    for product, parts in expected.products.items():
        for part, arrays in parts.items():
            for array, its in zip(arrays, adapter.products[product][part], strict=True):
                assert its.dtype == array.dtype
                np.testing.assert_array_equal(its.view(np.uint16), array.view(np.uint16))


def pid_of(process: AdapterProcess) -> int:
    return process._end.peek()[2][1].pid


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_it_reads(tmp_path, form):
    """Without attention's tensors too: then experts' are the first in the shared memory."""
    config = ModelConfig.read(GOLDENS / "qwen3_moe_dense_layer_bf16")
    reader = AdapterProcess(config, BFLOAT16, 4, with_experts=True, num_processes=2)
    written = write_expert_adapter(tmp_path, config, form)
    try:
        expected = read_adapter(written.folder, config, BFLOAT16, 4, with_experts=True)
        assert_equal(reader.read(written.folder), expected)
        of_experts = {name: array for name, array in written.tensors.items() if ".experts" in name}
        save(tmp_path / "adapter_model.safetensors", of_experts)
        config_file = tmp_path / "adapter_config.json"
        config_file.write_text(config_file.read_text().replace(', "gate.weight"', ""))
        expected = read_adapter(written.folder, config, BFLOAT16, 4, with_experts=True)
        assert {product for _, product in expected.products} == {GATE_UP, DOWN}
        assert_equal(reader.read(written.folder), expected)
    finally:
        reader.close()


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_what_it_reads(process, tmp_path, dtype):
    written = write_adapter(tmp_path / "one", CONFIG, rank=8, strength=2.0, dtype=np.dtype(dtype))
    adapter = process.read(written.folder)
    assert_equal(adapter, read_adapter(written.folder, CONFIG, BFLOAT16, 16))
    with pytest.raises(ModelError, match="no such folder"):
        process.read(tmp_path / "missing")
    assert_equal(process.read(written.folder), adapter)


def test_a_process_that_has_died_starts_again(process, tmp_path):
    written = write_adapter(tmp_path / "one", CONFIG, rank=8)
    before = process.read(written.folder)
    os.kill(pid_of(process), signal.SIGKILL)
    assert_equal(process.read(written.folder), before)


def test_it_ends_with_its_owner():
    reader = AdapterProcess(CONFIG, BFLOAT16, 16, num_processes=3)
    pid = pid_of(reader)
    del reader
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_memory_is_used_again_once_its_adapter_is_dropped(process, tmp_path):
    folder = write_adapter(tmp_path / "one", CONFIG).folder
    first, *others = [process.read(folder) for _ in range(4)]
    process._memories._maker.submit(int).result()  # the one made ahead is there
    num_memories = len(process._memories.descriptors)
    assert 4 < num_memories < 7
    arrays = next(iter(first.products.values()))[0]
    expected = [array.copy() for array in arrays]
    del first, others
    for _ in range(8):
        assert_equal(process.read(folder), read_adapter(folder, CONFIG, BFLOAT16, 16))
    assert len(process._memories.descriptors) == num_memories
    for array, its in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array.view(np.uint16), its.view(np.uint16))


def test_adapters_at_once_have_memories_of_their_own(process, tmp_path):
    folders = [write_adapter(tmp_path / str(n), CONFIG, rank=n + 7, seed=n, strength=2.0).folder for n in range(3)]
    adapters = [process.read(folder) for folder in (*folders, folders[0])]
    for adapter, folder in zip(adapters, folders, strict=False):
        assert_equal(adapter, read_adapter(folder, CONFIG, BFLOAT16, 16))
