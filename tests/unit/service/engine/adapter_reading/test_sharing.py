"""Processes that read shares of one adapter; errors and deaths of one are those of the reader."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.adapter import read_adapter
from model.weights.lora.modules import read_modules
from model.weights.safetensors_file import StoredFile
from service.engine.adapter_reading.process import AdapterProcess
from tests.support.adapters import write_adapter
from tests.support.demo_engine import DEMO

CONFIG = ModelConfig.read(DEMO)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUM_PROCESSES = 3


@pytest.fixture
def process():
    reader = AdapterProcess(CONFIG, BFLOAT16, 16, num_processes=NUM_PROCESSES)
    yield reader
    reader.close()


def children_of(process: AdapterProcess) -> list[int]:
    pid = process._end.peek()[2][1].pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_shares_are_the_whole(tmp_path):
    folder = write_adapter(tmp_path / "one", CONFIG, rank=8, strength=2.0).folder
    memories = [np.zeros(1 << 20, np.uint8) for _ in range(2)]
    whole, shared = ((lambda count, memory=memory: memory[:count]) for memory in memories)

    class Others:
        count = 2

        def start(self, path, shares):
            sent = pickle.loads(pickle.dumps(shares))
            self.read = [read_modules(StoredFile(path), share, memories[1], BFLOAT16) for share in sent]

        def digests(self):
            return self.read

    expected = read_adapter(folder, CONFIG, BFLOAT16, 16, whole)
    assert read_adapter(folder, CONFIG, BFLOAT16, 16, shared, others=Others()).digest == expected.digest
    np.testing.assert_array_equal(*memories)


@pytest.mark.parametrize("layer", range(CONFIG.num_layers))
def test_a_value_that_is_not_finite_is_named_whichever_process_reads_it(process, tmp_path, layer):
    module = f"model.layers.{layer}.self_attn.v_proj"
    written = write_adapter(tmp_path / "bad", CONFIG, alpha_pattern={f"^{module}": 1e6}, rank=8)
    data = (written.folder / "adapter_model.safetensors").read_bytes()
    name = f"base_model.model.{module}.lora_B.weight"
    good = written.tensors[name].tobytes()
    assert data.count(good) == 1
    bad = good[:-4] + np.float32(np.nan).tobytes()
    (written.folder / "adapter_model.safetensors").write_bytes(data.replace(good, bad))
    with pytest.raises(ModelError, match=f"{name}.*NaN or infinity"):
        process.read(written.folder)
    other = write_adapter(tmp_path / "good", CONFIG, rank=8).folder
    assert process.read(other).digest == read_adapter(other, CONFIG, BFLOAT16, 16).digest


def test_all_start_again_if_one_has_died(process, tmp_path):
    folder = write_adapter(tmp_path / "one", CONFIG, rank=8).folder
    before = process.read(folder)
    children = children_of(process)
    assert len(children) == NUM_PROCESSES - 1
    os.kill(children[0], signal.SIGKILL)
    assert process.read(folder).digest == before.digest
    assert not set(children) & set(children_of(process))
