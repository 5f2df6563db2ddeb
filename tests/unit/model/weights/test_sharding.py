"""Every family and every format, divided among ranks, against one rank; what does not divide is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Llama
from model.kv_scales import measure_kv_scales
from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import Section, Split
from model.ops.interface import Ops
from model.ops.weight import Weight, WeightFormat
from model.weights.checkpoint import expected_shapes, is_projection
from model.weights.formats.stored_matrix import StoredMatrix, WeightForm
from model.weights.loader import load_model, plan_weights
from model.weights.sharding import Sharding
from model.weights.writer import write_quantised
from tests.support.doubled_mlp import double_mlp
from tests.support.goldens import IN_OTHERS, NAMES, Golden, relative_error
from tests.support.group import group_of
from tests.support.paged import PagedSequences
from tests.support.safetensors_bytes import save

FORMATS = Path(__file__).parent / "formats" / "goldens"
FLOAT32 = np.dtype(np.float32)
EXACT_ERROR = 1e-5
ROUNDED_ERROR = 0.1
"""A rank's part of a row has its own scale: inputs of o and down are rounded otherwise than whole ones."""

HEADS_OF_NO_FOUR = ("llama_dynamic_bf16", "llama_head256_bf16", "llama_yarn_bf16", "qwen2_bf16")
SHAPE = ModelConfig.read(Golden.load("llama31_bf16").folder)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        (name, count)
        for name in NAMES
        for count in (2, 4)
        if not name.startswith(IN_OTHERS) and (name, count) not in {(each, 4) for each in HEADS_OF_NO_FOUR}
    ],
)
def test_every_family(name: str, num_ranks: int):
    golden = Golden.load(name)
    model = golden.model(group_of(num_ranks))
    planned = plan_weights(golden.folder, model.config, FLOAT32, num_ranks=num_ranks)
    assert planned.num_bytes == model.weights.num_bytes - model.weights.table_bytes
    logits = golden.in_chunks(model, [golden.num_prompt, 32], 16)
    assert relative_error(logits, golden.logits) < EXACT_ERROR
    greedy = logits.argmax(axis=1)[golden.num_prompt - 1 : -1]
    assert greedy.tolist() == golden.token_ids[golden.num_prompt :].tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_repeat(num_ranks: int):
    golden = Golden.load("olmo3_bf16")
    first, again = (golden.in_chunks(golden.model(group_of(num_ranks)), [33, 1, 26], 16) for _ in range(2))
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("name", ["llama_biases_sharded_fp32", "olmo2_bf16", "phi4_mini_longrope_bf16"])
def test_bfloat16_an_fp8_cache_and_matrices_rounded_while_loading(name: str):
    golden = Golden.load(name)
    half, cache = group_of(2, np.dtype(ml_dtypes.bfloat16)), group_of(4, kv_dtype=np.dtype(np.uint8))
    assert relative_error(golden.in_chunks(golden.model(half), [104], 16), golden.logits) < 2e-2
    model = golden.model(cache)
    scales, one = measure_kv_scales(model, 16, 64), golden.model(NumpyOps(kv_dtype=np.dtype(np.uint8)))
    np.testing.assert_array_equal(scales, measure_kv_scales(one, 16, 64))
    expected = golden.in_chunks(one, [104], 16)
    assert relative_error(golden.in_chunks(model, [104], 16), expected) < 0.05  # a flipped rounding of a key is seen
    rounded = load_model(golden.folder, model.config, group_of(2), 128, quantization="fp8")
    planned = plan_weights(golden.folder, model.config, FLOAT32, "fp8", num_ranks=2)
    assert planned.num_bytes == rounded.weights.num_bytes - rounded.weights.table_bytes
    assert relative_error(golden.in_chunks(rounded, [104], 16), golden.logits) < 0.2


def logits_of(folder: Path, ops: Ops, *, exact: bool) -> np.ndarray:
    config = ModelConfig.read(folder)
    model = load_model(folder, config, ops, 64)
    if exact:
        layers = tuple(
            replace(layer, **{name: replace(each, quantised_input=False) for name, each in vars(layer).items()
                              if isinstance(each, Weight)})
            for layer in model.weights.layers
        )  # fmt: skip
        model = Llama(config, ops, replace(model.weights, layers=layers))
    [logits] = PagedSequences(model, 1, 64, 16).forward([(0, np.arange(40) % config.vocab_size)])
    return logits


GROUPED = ("awq", "gptq", "gptq_asym", "gptq_desc_act", "gptq_v2_asym", "int4_packed", "int4_packed_asym")
REFUSED = {
    **dict.fromkeys(GROUPED, "32 inputs straddles ranks, which have 48"),
    "int4_packed_channel": "96 inputs straddles ranks, which have 48|128 inputs straddles ranks, which have 64",
    **dict.fromkeys(
        ("fp8_block", "deepseek_block", "qwen3_moe_fp8_block"), "q_proj: a block or group of 128 rows straddles"
    ),
}
ROUNDED_INPUTS = ("fp8_dynamic", "fp8_static", "fp8_tensor", "fp8_mixed", "modelopt_fp8", "int8_w8a8")


@pytest.mark.parametrize("folder", sorted(FORMATS.iterdir()), ids=lambda folder: folder.name)
def test_every_format(folder: Path):
    if folder.name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[folder.name]):
            load_model(folder, ModelConfig.read(folder), group_of(2), 64)
        return
    expected = logits_of(folder, NumpyOps(), exact=True)
    assert relative_error(logits_of(folder, group_of(4), exact=True), expected) < EXACT_ERROR
    if folder.name in ROUNDED_INPUTS:
        expected = logits_of(folder, NumpyOps(), exact=False)
        assert relative_error(logits_of(folder, group_of(2), exact=False), expected) < ROUNDED_ERROR


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_every_format_that_divide(tmp_path: Path, name: str):
    """Groups of desc_act have inputs of both ranks."""
    folder = double_mlp(FORMATS / name, tmp_path / "model", mixes_groups=name == "gptq_desc_act")
    ops, config = group_of(2), ModelConfig.read(folder)
    weights = load_model(folder, config, ops, 64).weights
    assert (weights.layers[0].output.input_order is not None) == (name == "gptq_desc_act")
    expected = logits_of(folder, NumpyOps(), exact=True)
    assert relative_error(logits_of(folder, ops, exact=True), expected) < EXACT_ERROR


def test_several_gpus_refuse_groups_of_inputs_of_all_ranks(tmp_path: Path):
    folder, gpus = double_mlp(FORMATS / "gptq_desc_act", tmp_path / "model", mixes_groups=True), group_of(2)
    gpus.name = "cuda"
    with pytest.raises(ModelError, match=r"o_proj.*: its groups \(desc_act\) take inputs of several GPUs"):
        load_model(folder, ModelConfig.read(folder), gpus, 64)


def write_folder(folder: Path, tensors_of: Callable[[str, tuple[int, ...]], dict[str, np.ndarray]], **fields) -> Path:
    """A model of random tensors whose parts hold whole groups of 32 and blocks of 128."""
    raw = json.loads((Golden.load("llama31_bf16").folder / "config.json").read_text())
    raw |= {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512} | fields
    raw["num_hidden_layers"] = 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = expected_shapes(ModelConfig.read(folder))
    save(
        folder / "model.safetensors",
        {k: v for name, shape in shapes.items() for k, v in tensors_of(name, shape).items()},
    )
    return folder


def dense(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    values = np.random.default_rng(len(name)).standard_normal(shape, np.float32)
    return {name: np.ones(shape, np.float32) if len(shape) == 1 else values / np.float32(8)}


def in_blocks(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    if not is_projection(name):
        return dense(name, shape)
    rng = np.random.default_rng(len(name))
    scales = rng.uniform(0.01, 0.1, [-(-size // 128) for size in shape]).astype(np.float32)
    return {name: rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scales}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("form", [WeightFormat.FP8_BLOCK, WeightFormat.INT4])
def test_blocks_and_groups_that_divide(tmp_path: Path, form: WeightFormat):
    if form is WeightFormat.FP8_BLOCK:
        folder = write_folder(tmp_path / "model", in_blocks, quantization_config=BLOCKS)
    else:
        folder = tmp_path / "int4"
        write_quantised(write_folder(tmp_path / "model", dense), folder, "int4-g32", lambda written: None)
    expected = logits_of(folder, NumpyOps(), exact=True)
    for num_ranks in (2, 4):
        assert relative_error(logits_of(folder, group_of(num_ranks), exact=True), expected) < EXACT_ERROR
        planned = plan_weights(folder, ModelConfig.read(folder), FLOAT32, num_ranks=num_ranks)
        weights = load_model(folder, ModelConfig.read(folder), group_of(num_ranks), 64).weights
        assert planned.num_bytes == weights.num_bytes - weights.table_bytes
        assert weights.layers[0].down.format is form


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path):
    for name, tied in (("own", False), ("tied", True)):
        folder = write_folder(tmp_path / name, dense, vocab_size=129, tie_word_embeddings=tied)
        logits = logits_of(folder, group_of(4), exact=True)
        assert logits.shape == (40, 129)
        assert relative_error(logits, logits_of(folder, NumpyOps(), exact=True)) < EXACT_ERROR


def test_zero_points_are_divided_as_their_groups():
    sharding = Sharding(replace(SHAPE, intermediate_size=256), 2)
    form = WeightForm(WeightFormat.INT4, group_size=64, has_zero_point=True)
    splits = sharding.array_splits("model.layers.0.mlp.down_proj.weight", StoredMatrix("down", (64, 256), form, {}))
    assert splits == {
        "data": Split(1, (Section(128),)),
        "scale": Split(1, (Section(4),)),
        "zero_point": Split(1, (Section(4),)),
    }


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "4 does not divide 6 attention heads"),
        ({"intermediate_size": 98}, 4, "4 does not divide 98 columns of the MLP"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "of 2 ranks and 3 KV heads neither divides the other"),
        ({"num_heads": 40, "num_kv_heads": 10}, 4, r"of 4 ranks and 10 KV heads neither divides the other \(1, 2\)"),
        ({"vocab_size": 3}, 4, "the last of 4 ranks gets nothing of the vocabulary of 3"),
        ({"vocab_size": 9}, 4, r"the last of 4 ranks gets nothing of the vocabulary of 9 \(1, 2\)"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(changes: dict[str, int], num_ranks: int, message: str):
    with pytest.raises(ModelError, match=f"^--tensor-parallel-size: {message}"):
        Sharding(replace(SHAPE, **changes), num_ranks)


def test_a_value_that_is_not_finite_is_found_on_any_rank(tmp_path: Path):
    def broken(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        tensors = dense(name, shape)
        if name.endswith("down_proj.weight"):
            tensors[name][3, -1] = np.inf
        return tensors

    folder = write_folder(tmp_path / "model", broken)
    for quantization in ("auto", "fp8"):
        with pytest.raises(ModelError, match=r"down_proj.*holds NaN or infinity"):
            load_model(folder, ModelConfig.read(folder), group_of(2), 64, quantization=quantization)
