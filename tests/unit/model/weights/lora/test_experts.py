"""Tensors of experts' adapters: what is read, and what is refused by one line."""

import json

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.adapter import read_adapter, read_digest
from model.weights.lora.products import DOWN, GATE_UP, ROUTER
from tests.support.expert_adapters import FORMS, write_expert_adapter
from tests.support.goldens import FOLDER as GOLDENS
from tests.support.kernel_checks import NUMPY_DTYPES
from tests.support.safetensors_bytes import save

FLOAT32 = np.dtype(np.float32)
BASE = "base_model.model.model.layers.3.mlp"  # layers 1 and 3 of 4 could have experts, and 1 is dense
GATE = f"{BASE}.experts.2.gate_proj.lora_A.weight"
STACK = f"{BASE}.experts.base_layer.lora_A.weight"
ABSENT = None


@pytest.fixture(scope="module")
def config():
    """8 experts [32, 64] in layer 3 of 4."""
    return ModelConfig.read(GOLDENS / "qwen3_moe_dense_layer_bf16")


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def pair_of(name: str) -> dict[str, np.ndarray]:
    return {name: zeros(4, 64), name.replace("lora_A", "lora_B"): zeros(32, 4)}


EACH = {
    "an expert beyond the last": (pair_of(GATE.replace(".2.", ".8.")), "no such module of 8 experts"),
    "a fused module": (pair_of(GATE.replace("gate_proj", "gate_up_proj")), "no such module of 8 experts"),
    "a dense layer": (pair_of(GATE.replace("layers.3", "layers.1")), "the model has no such experts to adapt"),
    "no B": ({GATE.replace("lora_A", "lora_B"): ABSENT}, "lora_B of this module is missing"),
    "the wrong rank": ({GATE: zeros(5, 64)}, "shape [5, 64] is not [4, 64]"),
    "the wrong inputs": ({GATE: zeros(4, 32)}, "shape [4, 32] is not [4, 64]"),
    "another dtype": ({GATE: np.zeros((4, 64), np.float16)}, "dtype float16 differs from other experts' (float32)"),
    "integers": ({GATE: np.zeros((4, 64), np.int32)}, "dtype int32 is not supported"),
    "NaN": ({GATE: np.full((4, 64), np.nan, np.float32)}, "NaN or infinity in float32"),
    "a stack as well": (
        {STACK: zeros(32, 64), STACK.replace("_A", "_B"): zeros(64, 32)},
        "this layer's experts are adapted one by one as well",
    ),
    "a biased router": ({f"{BASE}.gate.lora_B.bias": zeros(8)}, "biases are not supported"),
}
STACKS = {
    "a stack of another width": ({STACK: zeros(32, 48)}, "shape [32, 48] with 64 outputs is no stack's"),
    "a stack of fewer experts": ({STACK: zeros(28, 64)}, "shape [28, 64] is not [32, 64]"),
    "three dimensions": ({STACK: zeros(8, 4, 64)}, "shape [8, 4, 64] is not a matrix's"),
    "a product twice": (
        {name.replace("base_layer", "base_layer.base_layer"): array for name, array in
         ((STACK, zeros(32, 64)), (STACK.replace("_A", "_B"), zeros(64, 32)))},
        "gate_up_proj of this layer is adapted twice",
    ),
    "no stack": (
        {STACK: ABSENT, STACK.replace("_A", "_B"): ABSENT},
        "no tensors of model.layers.3.mlp.experts.gate_up_proj, which target_parameters names",
    ),
    "no router": (
        {f"{BASE}.gate.lora_{side}.weight": ABSENT for side in "AB"},
        "no tensors of model.layers.3.mlp.gate.weight, which target_parameters names",
    ),
}  # fmt: skip


def refusal(adapter, changes, config) -> str:
    tensors = {name: array for name, array in (adapter.tensors | changes).items() if array is not ABSENT}
    save(adapter.folder / "adapter_model.safetensors", tensors)
    with pytest.raises(ModelError) as caught:
        read_adapter(adapter.folder, config, FLOAT32, 8, with_experts=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", EACH)
def test_malformed_tensors_of_experts_are_refused(tmp_path, config, name):
    changes, problem = EACH[name]
    assert problem in refusal(write_expert_adapter(tmp_path, config), changes, config)


@pytest.mark.parametrize("name", STACKS)
def test_malformed_stacks_are_refused(tmp_path, config, name):
    changes, problem = STACKS[name]
    assert problem in refusal(write_expert_adapter(tmp_path, config, "fused"), changes, config)


@pytest.mark.parametrize("form", FORMS)
def test_every_product_is_read(tmp_path, config, form):
    """An expert without tensors has zeros; adapters that were stacked have their own ranks again."""
    written = write_expert_adapter(tmp_path, config, form)
    read = read_adapter(written.folder, config, FLOAT32, 4, with_experts=True)
    assert set(read.products) == {(3, name) for name in ("qkv", ROUTER, GATE_UP, DOWN)}
    shapes = {part: tuple(array.shape for array in pair) for part, pair in read.products[3, GATE_UP].items()}
    assert shapes == dict.fromkeys((0, 1), ((8, 4, 64), (8, 32, 4)))
    assert [array.shape for array in read.products[3, DOWN][0]] == [(8, 4, 32), (8, 64, 4)]
    assert read.rank == 4
    for dtype in (FLOAT32, NUMPY_DTYPES["bfloat16"]):
        assert read_adapter(written.folder, config, dtype, 8, with_experts=True).digest == read.digest
    assert read_digest(written.folder, config, 4, with_experts=True) == read.digest


def test_values_match_each_expert(tmp_path, config):
    changes = []
    for form in ("each", "fused"):
        written = write_expert_adapter(tmp_path / form, config, form, rank=2, seed=3)
        products = read_adapter(written.folder, config, FLOAT32, 8, with_experts=True).products
        for expert in range(8):
            for (product, part), module in {(GATE_UP, 0): "gate", (GATE_UP, 1): "up", (DOWN, 0): "down"}.items():
                a, b = products[3, product][part]
                wanted = written.deltas[f"model.layers.3.mlp.experts.{expert}.{module}_proj"]
                np.testing.assert_allclose(b[expert] @ a[expert], wanted, atol=1e-6)
                changes.append(wanted)
    assert all(change.any() for change in changes)


def test_a_rank_above_the_limit_is_refused(tmp_path, config):
    written = write_expert_adapter(tmp_path / "8", config, "fused", rank=8, rank_pattern={"gate_up_proj": 16})
    tensors = {name: np.repeat(array, 2, axis=int("lora_B" in name)) for name, array in written.tensors.items()}
    wider = {name: array for name, array in tensors.items() if "base_layer" in name}
    assert "rank 16 exceeds --max-lora-rank (8)" in refusal(written, wider, config)
    each = write_expert_adapter(tmp_path / "each", config, rank=8, rank_pattern={"experts.1.up_proj": 4})
    change = {f"{BASE}.experts.1.up_proj.lora_A.weight": zeros(4, 64)}
    change[f"{BASE}.experts.1.up_proj.lora_B.weight"] = zeros(32, 4)
    assert "rank or scale differ from model.layers.3.mlp.experts.0.up_proj's" in refusal(each, change, config)


@pytest.mark.parametrize("targets", [None, []])
def test_parameters_may_be_the_only_targets(tmp_path, config, targets):
    written = write_expert_adapter(tmp_path, config, "stacks", target_modules=targets)
    assert (3, GATE_UP) in read_adapter(written.folder, config, FLOAT32, 8, with_experts=True).products


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["experts.bias"], "'experts.bias' is not supported (experts.gate_up_proj, experts.down_proj, gate.weight)"),
        ("gate_up_proj", "target_parameters: not a list of names"),
    ],
)
def test_other_parameters_are_refused(tmp_path, config, targets, problem):
    written = write_expert_adapter(tmp_path, config, "fused", target_parameters=targets)
    assert problem in refusal(written, {}, config)


def test_parameters_are_refused_while_experts_are_off(tmp_path, config):
    written = write_expert_adapter(tmp_path, config, "fused")
    with pytest.raises(
        ModelError, match=r"target_parameters: adapters of experts and routers are off \(--lora-experts\)"
    ):
        read_adapter(written.folder, config, FLOAT32, 8)
    config_file = written.folder / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"target_parameters": None}))
    with pytest.raises(ModelError, match=r"adapters of experts and routers are off \(--lora-experts\)"):
        read_adapter(written.folder, config, FLOAT32, 8)
