"""`quire check` on the device: the pool it tells of is the one that a worker's engine then makes."""

import re
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT

pytestmark = pytest.mark.gpu

SHARE, NUM_SEQS = 0.5, 300
CHECK = (
    "-m", "service.cli.main", "check", "--device", "cuda", "--model-config", "llama-3.2-1b", "--load-format", "dummy",
    "--gpu-memory-utilization", str(SHARE), "--max-num-seqs", str(NUM_SEQS),
)  # fmt: skip
MAKE = f"""
from service.config import Settings
from service.engine.build import build_engine
made = build_engine(
    Settings(
        model_config="llama-3.2-1b", load_format="dummy", device="cuda", gpu_memory_utilization={SHARE},
        max_num_seqs={NUM_SEQS}, swap_space=0.0,
    ),
    progress=False,
)
print(made.engine.pool.num_blocks, made.memory.max_model_len)
"""


def said(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_check_tells_the_pool_that_is_made(open_ops):
    open_ops("bfloat16").synchronize()  # or skips where there is no GPU
    table = said(*CHECK)
    print(table)
    num_blocks, max_model_len = said("-c", MAKE).split()
    assert re.search(rf"^blocks +{num_blocks} of 16 tokens", table, re.M)
    assert re.search(rf"^longest sequence +{max_model_len} tokens", table, re.M)
    assert re.search(r"^a step's workspace +[0-9.]+ [GM]iB", table, re.M)
