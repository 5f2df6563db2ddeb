"""The size of the pool, and the report of `quire check`."""

import re
from dataclasses import replace

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.presets import PRESETS
from service.cli.main import main
from service.cli.models import DEMO_MODEL
from service.cli.parser import make_parser
from service.config.settings import SERVE, Settings
from service.config.sources import read_settings
from service.engine.build import build_engine, num_swap_blocks
from service.engine.kv import memory_profile as engine_memory
from service.engine.kv.memory_profile import host_memory_bytes, plan_memory
from service.errors import StartupError

CONFIG = PRESETS["llama-3.2-1b"]
GIB = 1 << 30


class SizedOps(NumpyOps):
    """A device of 80 GiB with this much free."""

    def __init__(self, name, free_bytes):
        super().__init__(np.dtype(np.float16))
        self.name, self.free_bytes = name, free_bytes

    def memory_bytes(self):
        return self.free_bytes, 80 * GIB


def plan(ops, wanted_len=4096, reserved_bytes=0, **settings):
    return plan_memory(Settings(**settings), CONFIG, ops, wanted_len, reserved_bytes=reserved_bytes)


def test_a_gpu_gives_its_share_less_what_is_taken():
    memory = plan(SizedOps("cuda", 60 * GIB), gpu_memory_utilization=0.9, max_num_seqs=4096)
    held = memory.num_blocks * memory.block_bytes
    assert memory.block_bytes == CONFIG.num_layers * 2 * CONFIG.num_kv_heads * 16 * CONFIG.head_dim * 2
    assert 60 * GIB - 8 * GIB - GIB < held <= 60 * GIB - 8 * GIB
    assert plan(SizedOps("cuda", 60 * GIB), reserved_bytes=10 * GIB, max_num_seqs=4096).num_blocks < memory.num_blocks


def test_a_cpu_gives_a_bounded_part_and_none_more_than_the_sequences_can_use():
    assert plan(SizedOps("numpy", 60 * GIB), max_num_seqs=4096).num_blocks * 524288 == 2 * GIB
    assert plan(SizedOps("cuda", 60 * GIB), max_num_seqs=2).num_blocks == 2 * 4096 // 16


def test_a_small_pool_shortens_the_longest_sequence():
    assert plan(SizedOps("cuda", 60 * GIB), num_gpu_blocks=10).max_model_len == 160


@pytest.mark.parametrize(
    ("free_bytes", "settings", "word"),
    [
        (8 * GIB, {}, "no memory .* 8.0 GiB of 80.0 GiB are left .* raise --gpu-memory-utilization"),
        (60 * GIB, {"num_gpu_blocks": 10, "max_model_len": 161}, "--max-model-len"),
        (GIB, {"num_gpu_blocks": 30_000}, "--num-gpu-blocks: 30000 blocks take 14.6 GiB, and 1.0 GiB of 80.0 GiB"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(free_bytes, settings, word):
    with pytest.raises(StartupError, match=word) as refusal:
        plan(SizedOps("cuda", free_bytes), **settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("free_gib", "flags"),
    [
        (60, []),
        (60, ["--max-num-seqs", "4096"]),
        (0.03, ["--max-num-seqs", "64", "--max-model-len", "100"]),
        (0.02, ["--dtype", "bfloat16"]),
        (60, ["--num-gpu-blocks", "64", "--block-size", "8"]),
    ],
    ids=str,
)
def test_check_reports_the_pool_that_serve_allocates(capsys, monkeypatch, free_gib, flags):
    monkeypatch.setattr(NumpyOps, "memory_bytes", lambda self: (int(free_gib * GIB), 80 * GIB))
    flags = ["--device", "cpu", *flags]
    assert main(["check", *flags]) == 0
    received = capsys.readouterr().out
    settings = read_settings(SERVE, make_parser().parse_args([SERVE, *flags]), {})
    made = build_engine(replace(settings, model=DEMO_MODEL), progress=False)
    pool = made.engine.pool
    assert f"{pool.num_blocks} of {made.memory.block_size} tokens, {made.memory.block_bytes} bytes each" in received
    assert re.search(rf"longest sequence +{made.memory.max_model_len} tokens", received)
    assert made.executor.kv.shape[0] == pool.num_blocks


def test_check_counts_whole_blocks(capsys):
    assert main(["check", "--device", "cpu", "--num-gpu-blocks", "64", "--length", "100"]) == 0
    assert re.search(r"100 tokens each +9 sequences at once", capsys.readouterr().out)  # of 7 blocks each
    assert main(["check", "--device", "cpu", "--num-gpu-blocks", "640", "--length", "5000"]) == 0
    assert re.search(r"5000 tokens each +0 sequences at once", capsys.readouterr().out)  # the model ends before
    assert main(["check", "--device", "cpu", "--num-gpu-blocks", "4", "--max-model-len", "100"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_swap_space_is_as_configured_or_a_part_of_the_hosts_memory(tmp_path, monkeypatch):
    ops, limit = SizedOps("cuda", 60 * GIB), tmp_path / "memory.max"
    monkeypatch.setattr(engine_memory, "CGROUP_LIMIT", limit)
    memory = plan(ops, max_num_seqs=4096)
    physical = host_memory_bytes()
    limit.write_text("max\n")
    assert host_memory_bytes() == physical
    limit.write_text(f"{GIB}\n")
    assert host_memory_bytes() == min(GIB, physical)
    assert num_swap_blocks(Settings(), ops, memory) == host_memory_bytes() // 8 // memory.block_bytes
    assert num_swap_blocks(Settings(swap_space=2.0), ops, memory) == 2 * GIB // memory.block_bytes
    assert num_swap_blocks(Settings(), SizedOps("numpy", GIB), memory) == 0
    small = plan(ops, num_gpu_blocks=10)
    assert num_swap_blocks(Settings(swap_space=2.0), ops, small) == 80
