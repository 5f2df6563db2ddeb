"""`quire check` on the device reports the pool that a worker's engine then makes."""

import re
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT

pytestmark = pytest.mark.gpu

SHARE, NUM_SEQS = 0.5, 300

CARD_BYTES = 24 << 30
ALONE = f"""
import cupy
from model.ops.gpu.device import CudaDevice

def memory_bytes(self):
    return {CARD_BYTES} - cupy.get_default_memory_pool().used_bytes(), {CARD_BYTES}

CudaDevice.memory_bytes = memory_bytes
"""
"""Memory of a card as if this process alone used it: on the real one others may come and go between the two compared
processes."""

FLAGS = (
    "check", "--device", "cuda", "--model-config", "llama-3.2-1b", "--load-format", "dummy",
    "--gpu-memory-utilization", str(SHARE), "--max-num-seqs", str(NUM_SEQS),
)  # fmt: skip
CHECK = f"""
from service.cli.main import main
raise SystemExit(main({list(FLAGS)}))
"""
MAKE = f"""
from service.config.settings import Settings
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


def output_of(program):
    done = subprocess.run(
        [sys.executable, "-c", ALONE + program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)  # three processes, the first of which may compile every kernel
def test_check_reports_the_pool_that_an_engine_makes(open_ops):
    ops = open_ops("bfloat16")  # or skips without a GPU
    if ops.memory_bytes()[0] < CARD_BYTES:
        pytest.skip("others have the card's memory")
    output_of(MAKE)  # compiles what the cache lacks: with that comes a second warm-up, which grows other staging memory
    table = output_of(CHECK)
    print(table)
    num_blocks, max_model_len = output_of(MAKE).split()
    assert re.search(rf"^blocks +{num_blocks} of 16 tokens", table, re.M)
    assert re.search(rf"^longest sequence +{max_model_len} tokens", table, re.M)
    assert re.search(r"^a step's workspace +[0-9.]+ [GM]iB", table, re.M)
