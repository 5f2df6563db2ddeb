"""Experts divided among GPUs: the reference's logits, and captured steps through the engine.

Rounding sends some rows to other experts, so medians of rows are compared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.kv_cache import allocate
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import EngineRequest
from tests.support.expert_models import expert_model, write_config
from tests.support.goldens import relative_error
from tests.support.kernel_checks import NUMPY_DTYPES
from tests.support.received import run_steps
from tests.support.steps import BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS, by_itself, step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_tokens", [1, 7, 190])
@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_logits_match_the_reference(open_group, tmp_path, num_tokens, quantization):
    logits = []
    for ops in (open_group("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])):
        model = expert_model(tmp_path, ops, quantization)
        kv = allocate(ops, model.config, MAX_ROWS * MAX_BLOCKS, BLOCK_SIZE)
        logits.append(by_itself(model, kv, step(model, [(0, num_tokens)]), every_row=True))
    errors = np.array([relative_error(row, wanted) for row, wanted in zip(*logits, strict=True)])
    assert np.median(errors) < (15e-2 if quantization == "fp8" else 5e-2)
    assert np.mean(errors > 40e-2) < 0.1


def test_an_engine_answers_the_same_alone_and_together(open_group, tmp_path, monkeypatch):
    """Greedy tokens part at near ties: most first ones must agree."""
    group = open_group("bfloat16")
    monkeypatch.setattr("service.engine.build.open_devices", lambda settings, config: group)
    own = {"model": str(write_config(tmp_path)), "load_format": "dummy", "tensor_parallel_size": group.num_ranks}
    settings = replace(Settings(), max_num_seqs=8, swap_space=0.0, num_gpu_blocks=200, **own)
    engine = build_engine(settings, progress=False).engine
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    alone = {}
    for n in range(8):
        prompt = tuple(range(10 * n + 1, 10 * n + 5 + 9 * n))
        engine.add_request(EngineRequest(request_id=str(n), prompt=prompt, sampling=params))
        alone |= {name: one.by_branch() for name, one in run_steps(engine).items()}
    for n in range(8):
        prompt = tuple(range(10 * n + 1, 10 * n + 5 + 9 * n))
        engine.add_request(EngineRequest(request_id=f"again {n}", prompt=prompt, sampling=params))
    together = {name: one.by_branch() for name, one in run_steps(engine).items()}
    same = [together[f"again {name}"][0][0][0] == branches[0][0][0] for name, branches in alone.items()]
    assert all(len(branches[0][0]) == params.max_tokens for branches in together.values())
    assert np.mean(same) >= 0.75
