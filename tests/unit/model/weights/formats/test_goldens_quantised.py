"""Each format against transformers on the dequantised weights (make_quantised_goldens.py names the packers).

`quant_method: fp8`, ModelOpt's files and the blocks of GGUF's K-quants are written by their specification, all others
by their own tools.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Layer, Llama
from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight, WeightFormat
from model.weights.loader import load_model, plan_weights
from tests.support.goldens import Golden, relative_error
from tests.support.paged import PagedSequences

FOLDER = Path(__file__).parent / "goldens"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
ROUNDED = [name for name in NAMES if "rounded_logits" in np.load(FOLDER / name / "golden.npz")]
FORMS = {
    "fp8_dynamic": WeightFormat.FP8,
    "fp8_static": WeightFormat.FP8,
    "fp8_mixed": WeightFormat.FP8,
    "fp8_block": WeightFormat.FP8_BLOCK,
    "fp8_tensor": WeightFormat.FP8,
    "deepseek_block": WeightFormat.FP8_BLOCK,
    "qwen3_moe_fp8_block": WeightFormat.FP8_BLOCK,
    "mixtral_fp8_dynamic": WeightFormat.FP8,
    "modelopt_fp8": WeightFormat.FP8,
    "modelopt_nvfp4": WeightFormat.DENSE,
    "int8_w8a8": WeightFormat.INT8,
    "int8_w8a16": WeightFormat.INT8,
    "int8_w8a16_groups": WeightFormat.DENSE,
    "int4_packed": WeightFormat.INT4,
    "int4_packed_asym": WeightFormat.INT4,
    "int4_packed_channel": WeightFormat.INT4,
    "nvfp4": WeightFormat.DENSE,
    "mxfp4": WeightFormat.DENSE,
    "gptq": WeightFormat.INT4,
    "gptq_asym": WeightFormat.INT4,
    "gptq_v2_asym": WeightFormat.INT4,
    "gptq_desc_act": WeightFormat.INT4,
    "gptq_8bit_channel": WeightFormat.INT8,
    "gptq_8bit_groups": WeightFormat.DENSE,
    "awq": WeightFormat.INT4,
    "nf4": WeightFormat.DENSE,
    "nf4_nested": WeightFormat.DENSE,
    "gguf_q8_0": WeightFormat.DENSE,
    "gguf_k_quants": WeightFormat.DENSE,
}
"""The form of the last layer's `down`."""

EXACT_ERROR = 1e-5
ROUNDED_ERROR = 5e-2
"""The order of sums can flip the rounding of an input, which moves that element by up to 6 percent."""


def golden_of(name: str, prefix: str = "") -> Golden:
    with np.load(FOLDER / name / "golden.npz") as arrays:
        token_ids, logits = arrays[f"{prefix}token_ids"], arrays[f"{prefix}logits"]
        return Golden(FOLDER / name, token_ids, logits, int(arrays["num_prompt"]))


def load(golden: Golden, *, quantised_input: bool) -> Llama:
    model = load_model(golden.folder, ModelConfig.read(golden.folder), NumpyOps(), len(golden.token_ids))
    if quantised_input:
        return model
    layers = tuple(replace(layer, **exact_inputs(layer)) for layer in model.weights.layers)
    return Llama(model.config, model.ops, replace(model.weights, layers=layers))


def exact_inputs(layer: Layer) -> dict[str, Weight]:
    weights = {name: value for name, value in vars(layer).items() if isinstance(value, Weight)}
    return {name: replace(weight, quantised_input=False) for name, weight in weights.items()}


def test_every_form_has_a_golden():
    assert set(NAMES) == set(FORMS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_of_the_dequantised_model(name: str):
    golden = golden_of(name)
    model = load(golden, quantised_input=False)
    assert model.weights.layers[-1].down.format is FORMS[name]
    assert relative_error(golden.in_chunks(model, [104], 16), golden.logits) < EXACT_ERROR
    assert golden.greedy(model, 16) == golden.token_ids[golden.num_prompt :].tolist()


@pytest.mark.parametrize("name", ROUNDED)
def test_logits_and_greedy_tokens_with_rounded_inputs(name: str):
    golden = golden_of(name, "rounded_")
    model = load(golden, quantised_input=True)
    assert relative_error(golden.in_chunks(model, [104], 16), golden.logits) < ROUNDED_ERROR
    assert golden.greedy(model, 16) == golden.token_ids[golden.num_prompt :].tolist()


class DenseOps(NumpyOps):
    """A backend without products of quantised weights."""

    weight_formats = frozenset({WeightFormat.DENSE})


@pytest.mark.parametrize("name", ["fp8_dynamic", "int4_packed"])
def test_a_format_that_the_backend_lacks_is_refused_at_load(name: str):
    config = ModelConfig.read(FOLDER / name)
    with pytest.raises(ModelError, match=rf"proj.*: {FORMS[name]} is not supported on CPU \(dense\)"):
        load_model(FOLDER / name, config, DenseOps(), 16)


@pytest.mark.parametrize("name", NAMES)
def test_the_planned_bytes_are_what_is_loaded(name: str):
    folder, float32 = FOLDER / name, np.dtype(np.float32)
    config = ModelConfig.read(folder)
    weights = load_model(folder, config, NumpyOps(), 16).weights
    tables = weights.table_bytes
    planned = plan_weights(folder, config, float32)
    assert planned.num_bytes == weights.num_bytes - tables - sum(order_bytes(layer) for layer in weights.layers)
    assert planned.label


def order_bytes(layer: Layer) -> int:
    """Bytes of the orders of inputs, which a plan leaves out: four for each input."""
    matrices = [value for value in vars(layer).values() if isinstance(value, Weight)]
    return sum(weight.input_order.nbytes for weight in matrices if weight.input_order is not None)


@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights_have_the_folder_s_formats(name: str):
    folder = FOLDER / name
    config = ModelConfig.read(folder)
    model = load_model(folder, config, NumpyOps(), 32, load_format="dummy")
    assert model.weights.layers[-1].down.format is FORMS[name]
    logits = PagedSequences(model, 1, 32, 16).forward([(0, np.arange(20))])[0]
    assert np.isfinite(logits).all()
    assert 0.05 < logits.std() < 50
