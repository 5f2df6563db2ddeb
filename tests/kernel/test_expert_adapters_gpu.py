"""Adapters of experts on the device: captured steps against NumPy's, base steps next to them, an engine with them.

Rounding sends some rows to other experts: medians are compared (see test_experts_model_gpu.py).
"""

from dataclasses import replace

import numpy as np
import pytest

from model.adapter_slots import NO_SLOT, AdapterSlots
from model.cuda_graphs import StepGraphs
from model.kv_cache import allocate
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.weights.lora.adapter import read_adapter
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import AdapterSource, EngineRequest
from tests.support.expert_adapters import FORMS, write_expert_adapter
from tests.support.expert_models import expert_model, write_config
from tests.support.goldens import relative_error
from tests.support.kernel_checks import NUMPY_DTYPES
from tests.support.received import run_steps
from tests.support.steps import BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS, by_itself, step

pytestmark = pytest.mark.gpu

MAX_RANK = 16
STEPS = (
    ([(5, 1)], [0]),
    ([(5, 1)] * 3, [2, NO_SLOT, 1]),
    ([(40, 1)] * 8, [0, 1, 2, 3, 3, NO_SLOT, 1, 0]),
    ([(9, 1)] * 11, [3] * 11),
    ([(9, 1), (3, 1), (0, 40)], [1, 0, 2]),
    ([(0, 30), (8, 70)], [NO_SLOT, 3]),
    ([(0, 40), (0, 190)], [1, 1]),
)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch):
    for module in ("model.weights.loader", "service.engine.build"):
        monkeypatch.setattr(f"{module}.check_device", lambda config, ops: None)


def row_errors(logits, expected) -> np.ndarray:
    return np.array([relative_error(row, wanted) for row, wanted in zip(logits, expected, strict=True)])


def slots_with(model, folder) -> AdapterSlots:
    slots = AdapterSlots(model.config, model.ops, model.ops, len(FORMS), MAX_RANK, with_experts=True)
    for slot, form in enumerate(FORMS):
        how = {"rank": 3 if form == "fused" else 8, "seed": slot, "strength": 2.0}
        written = write_expert_adapter(folder / form, model.config, form, **how)
        read = read_adapter(written.folder, model.config, model.ops.dtype, MAX_RANK, with_experts=True)
        slots.write(slot, read).wait()
    return slots


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_captured_steps_match_numpy(open_ops, tmp_path, quantization):
    """Decodes and chunks of mixed adapters; steps without adapters run the kernels that they run without slots."""
    ops, reference = open_ops("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])
    model, on_numpy = (expert_model(tmp_path, each, quantization) for each in (ops, reference))
    slots, theirs = slots_with(model, tmp_path), slots_with(on_numpy, tmp_path)
    kv, kv_numpy = (allocate(each, model.config, MAX_ROWS * MAX_BLOCKS, BLOCK_SIZE) for each in (ops, reference))
    kv.data.memset_async(0, kv.nbytes, ops.stream)
    kv_numpy[:] = 0
    graphs = StepGraphs(model, ops.upload(np.arange(MAX_ROWS, dtype=np.int32)), MAX_ROWS, MAX_BLOCKS)
    graphs.capture(kv, adapters=slots)
    errors, changes = [], []
    for chunks, slots_of in STEPS:
        rows = np.repeat(np.array(slots_of, np.int32), [length for _, length in chunks])
        inputs = replace(step(model, chunks), adapter_slots=rows)
        expected = by_itself(on_numpy, kv_numpy, inputs, adapters=theirs)
        found = graphs.forward(inputs)
        if found is None:
            found = by_itself(model, kv, inputs, adapters=slots)
        logits = np.asarray(ops.download(found), np.float32)
        base = by_itself(on_numpy, kv_numpy.copy(), inputs)
        is_adapted = np.array(slots_of) != NO_SLOT
        errors.append(row_errors(logits, expected))
        changes.append(row_errors(logits, base)[is_adapted])
    every, changed = np.concatenate(errors), np.concatenate(changes)
    print(f"\n{quantization}: median error {np.median(every):.3f}, change by the adapter {np.median(changed):.3f}")
    assert np.median(every) < (15e-2 if quantization == "fp8" else 5e-2)
    assert np.mean(every > 40e-2) < 0.1
    assert np.median(changed) > 3 * np.median(every)


def test_base_steps_take_the_fused_kernels(open_ops, tmp_path, monkeypatch):
    ops = open_ops("bfloat16")
    model = expert_model(tmp_path, ops)
    launched, launch = [], type(ops).launch
    monkeypatch.setattr(
        type(ops),
        "launch",
        lambda ops, name, *args, **how: (launched.append(name), launch(ops, name, *args, **how))[1],
    )
    kv = allocate(ops, model.config, MAX_ROWS * MAX_BLOCKS, BLOCK_SIZE)
    seen = {}
    for name, slots in (("without", None), ("with", slots_with(model, tmp_path))):
        graphs = StepGraphs(model, ops.upload(np.arange(MAX_ROWS, dtype=np.int32)), MAX_ROWS, MAX_BLOCKS)
        graphs.capture(kv, adapters=slots)
        for rows in (1, 4):
            launched.clear()
            graphs._run(graphs._model, graphs._batch(rows, 0), kv)
            seen[name, rows] = list(launched)
    for rows in (1, 4):
        assert seen["without", rows] == seen["with", rows]
        assert "experts_lora" not in seen["with", rows]


def test_an_engine_serves_an_adapter_of_experts(open_ops, tmp_path):
    """Alone and with other requests; greedy tokens part at near ties: most first ones must agree."""
    open_ops("bfloat16")  # or skips where there is no GPU
    own = {"model": write_config(tmp_path), "device": "cuda", "load_format": "dummy", "enable_lora": True}
    settings = replace(Settings(), max_num_seqs=8, swap_space=0.0, num_gpu_blocks=128, lora_experts=True, **own)
    built = build_engine(settings, progress=False)
    folder = write_expert_adapter(tmp_path / "adapter", built.config, "stacks", rank=8, strength=4.0).folder
    digest = read_adapter(folder, built.config, built.ops.dtype, MAX_RANK, with_experts=True).digest
    source = AdapterSource(name="own", path=str(folder), digest=digest)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [
        EngineRequest(
            request_id=str(n),
            prompt=tuple(range(10 * n + 1, 10 * n + 5 + 9 * n)),
            sampling=params,
            adapter=source if n % 2 else None,
        )
        for n in range(8)
    ]
    tokens = []
    for turn in range(2):
        found = {}
        for request in requests:
            built.engine.add_request(replace(request, request_id=f"{turn} {request.request_id}"))
            if turn == 0:
                found |= {name: one.by_branch() for name, one in run_steps(built.engine).items()}
        found |= {name: one.by_branch() for name, one in run_steps(built.engine).items()}
        tokens.append([found[f"{turn} {n}"][0][0] for n in range(8)])
    assert all(len(each) == params.max_tokens for each in tokens[1])
    assert np.mean([one[0] == other[0] for one, other in zip(*tokens, strict=True)]) >= 0.75
