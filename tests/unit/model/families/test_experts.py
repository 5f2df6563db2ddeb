"""Layers of experts: their product by plain loops, e4m3 after the router, the kinds of layers, and no GPU yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.batch import Batch
from model.config import ModelConfig
from model.errors import ModelError
from model.families.configs.family import ExpertsConfig
from model.families.experts import experts_mlp
from model.kv_cache import allocate
from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.quantised import dequantise
from model.ops.interface import Array, ExpertGroups
from model.ops.weight import ExpertWeights, Weight, WeightFormat
from model.weights.formats.stored_matrix import StoredMatrix
from model.weights.loader import load_model, plan_weights
from model.weights.writer import write_quantised
from tests.support.expert_models import expert_model
from tests.support.goldens import FOLDER, Golden, relative_error
from tests.support.kernel_checks import NUMPY_DTYPES
from tests.support.steps import BLOCK_SIZE

OPS = NumpyOps()
CONFIG = ExpertsConfig(num_experts=6, num_used=2, intermediate_size=24, renormalises=False, layers=(True,))
HIDDEN, ROWS = 32, 9
NAME = "qwen3_moe_dense_layer_bf16"


class Gpu(NumpyOps):
    name = "cuda"


class UnroundedInputs(NumpyOps):
    has_fp8 = False


def random_experts() -> tuple[ExpertWeights, np.ndarray]:
    rng, sizes = np.random.default_rng(0), (CONFIG.num_experts, CONFIG.intermediate_size)
    router, gate_up, down = (
        Weight(rng.standard_normal(shape).astype(np.float32) * np.float32(HIDDEN**-0.5))
        for shape in ((sizes[0], HIDDEN), (sizes[0], 2 * sizes[1], HIDDEN), (sizes[0], HIDDEN, sizes[1]))
    )
    return ExpertWeights(router, gate_up, down), rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)


def by_loops(experts: ExpertWeights, x: np.ndarray) -> np.ndarray:
    """One row and one expert at a time, in double precision."""
    out = np.zeros(x.shape)
    for row, inputs in enumerate(x.astype(np.float64)):
        probabilities = np.exp(experts.router.data @ inputs)
        probabilities /= probabilities.sum()
        for expert in np.argsort(-probabilities)[: CONFIG.num_used]:
            gate, up = np.split(experts.gate_up.data[expert] @ inputs, 2)
            out[row] += probabilities[expert] * (experts.down.data[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def test_the_sum_of_two_experts():
    experts, x = random_experts()
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    found = experts_mlp(OPS, CONFIG, experts, (np.zeros_like(x), x), (np.ones(HIDDEN, np.float32), 1e-6))
    assert relative_error(found, by_loops(experts, normed)) < 1e-5


def test_padding_of_a_step_takes_no_expert(tmp_path: Path):
    routed = []

    class Recording(NumpyOps):
        def group_by_expert(self, ids: Array, num_experts: int) -> ExpertGroups:
            routed.append(ids)
            return super().group_by_expert(ids, num_experts)

    model = expert_model(tmp_path, Recording())
    kv = allocate(model.ops, model.config, 4, BLOCK_SIZE)
    batch = Batch(
        token_ids=np.array([7, 9, 0], np.int32),
        positions=np.zeros(3, np.int32),
        slots=np.array([0, BLOCK_SIZE, 4 * BLOCK_SIZE]),
        block_tables=np.array([[0], [1], [0]], np.int32),
        context_lens=np.array([1, 1, 0], np.int32),
        query_start=np.array([3], np.int32),
        logit_rows=None,
        num_decodes=3,
        num_tokens=3,
        num_sequences=3,
        max_query_len=0,
    )
    model.forward(batch, kv)
    assert len(routed) == 2  # one layer of three has no experts
    for ids in routed:
        assert (ids[:2] >= 0).all()
        assert (ids[2] == -1).all()


def test_first_layer_keeps_a_dense_layer_and_one_of_experts():
    layers = Golden.load(NAME).model(OPS).first_layer().weights.layers
    assert [layer.router is not None for layer in layers] == [False, True]


def test_a_gpu_is_refused_by_name_before_anything_is_loaded():
    config = ModelConfig.read(FOLDER / NAME)
    narrow = replace(config, experts=replace(config.experts, intermediate_size=24))
    with pytest.raises(
        ModelError, match=r"moe_intermediate_size: 24 columns of experts are not supported on a GPU \(a m"
    ):
        load_model(None, narrow, Gpu(NUMPY_DTYPES["bfloat16"]), 16, load_format="dummy")
    with pytest.raises(
        ModelError, match=r"--dtype: float32 has no products of experts on a GPU, which qwen3_moe needs"
    ):
        load_model(None, config, Gpu(), 16, load_format="dummy")


@pytest.mark.parametrize("format_name", ["fp8", "int4-g32"])
def test_a_written_folder_computes_what_its_dequantised_matrices_do(tmp_path: Path, format_name: str):
    golden = Golden.load("mixtral_bf16")
    write_quantised(golden.folder, tmp_path / "out", format_name, lambda written: None)
    config = ModelConfig.read(tmp_path / "out")
    model = load_model(tmp_path / "out", config, UnroundedInputs(), len(golden.token_ids))
    layers = tuple(
        replace(
            layer,
            qkv=Weight(dequantise(layer.qkv)),
            output=Weight(dequantise(layer.output)),
            gate_up=Weight(np.stack([dequantise(layer.gate_up.expert(index)) for index in range(4)])),
            down=Weight(np.stack([dequantise(layer.down.expert(index)) for index in range(4)])),
        )
        for layer in model.weights.layers
    )
    whole = golden.model(NumpyOps())
    whole.weights = replace(whole.weights, layers=layers)
    expected = golden.in_chunks(whole, [104], 16)
    assert relative_error(golden.in_chunks(model, [104], 16), expected) < 1e-4


def test_one_expert_in_another_format_is_refused_by_both_names(tmp_path: Path, monkeypatch):
    golden = Golden.load("mixtral_bf16")
    write_quantised(golden.folder, tmp_path / "out", "fp8", lambda written: None)
    config, real = ModelConfig.read(tmp_path / "out"), StoredMatrix.__init__
    odd = "model.layers.1.block_sparse_moe.experts.2"

    def other_format(self, name, shape, form, *rest, **more):
        is_odd = name.startswith(odd)
        real(self, name, shape, replace(form, quantised_input=False) if is_odd else form, *rest, **more)

    monkeypatch.setattr(StoredMatrix, "__init__", other_format)
    with pytest.raises(ModelError, match=rf"experts\.0\.w1 and {odd}\.w1: are in two formats"):
        load_model(tmp_path / "out", config, NumpyOps(), 16)


def test_plans_count_experts_and_keep_the_router():
    config = ModelConfig.read(FOLDER / NAME)
    model = load_model(FOLDER / NAME, config, OPS, 16, quantization="fp8")
    planned = plan_weights(FOLDER / NAME, config, OPS.dtype, "fp8")
    assert planned.num_bytes == model.weights.num_bytes - model.weights.table_bytes
    routed = [layer for layer in model.weights.layers if layer.router is not None]
    assert planned.expert_bytes == sum(layer.gate_up.nbytes + layer.down.nbytes for layer in routed)
    assert [layer.gate_up.format for layer in model.weights.layers] == [WeightFormat.FP8] * 4
    assert model.weights.layers[3].router.format is WeightFormat.DENSE
