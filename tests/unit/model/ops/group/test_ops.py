"""Operations of a group against those of one rank: products, sums, norms over all heads, sampling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.dtypes import NUMPY_DTYPES
from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import GroupArray, PartialSums, Section, Split, SplitArray, divided
from model.ops.group.ops import GroupOps
from model.ops.weight import Weight, WeightFormat
from tests.support.group import group_of, loaded
from tests.support.sampling_cases import random_bias, random_mask, random_options, random_penalties, uploaded

ONE = NumpyOps()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def split_on(ops: GroupOps, whole: np.ndarray, split: Split) -> SplitArray:
    return loaded(ops, divided(ops.empty(split.part_shape(whole.shape, ops.num_ranks), whole.dtype), split), whole)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_of_products_is_in_rank_order_and_rounded_once(rng, dtype: str):
    ops = group_of(4, NUMPY_DTYPES[dtype])
    x, matrix, bias = (each.astype(ops.dtype) for each in (floats(rng, 3, 16), floats(rng, 8, 16), floats(rng, 8)))
    weight = Weight(split_on(ops, matrix, Split(1, (Section(16),))))
    partials = ops.linear(split_on(ops, x, Split(1, (Section(16),))), weight, ops.upload(bias))
    assert isinstance(partials, PartialSums)
    own, total = NumpyOps(ops.dtype), np.zeros((3, 8), np.float32)
    for rank in range(4):
        part = slice(4 * rank, 4 * rank + 4)
        product = own.linear(x[:, part], Weight(matrix[:, part]), bias if rank == 0 else None)
        total += product.astype(np.float32)
    residual, ones = ops.upload(x[:, :8]), ops.upload(np.ones(8, ops.dtype))
    ops.add_rms_norm(partials, residual, ones, 1e-5)
    expected = np.array(x[:, :8])
    own.add_rms_norm(total.astype(ops.dtype), expected, np.ones(8, ops.dtype), 1e-5)
    assert ops.download(residual).tobytes() == expected.tobytes()
    normed = own.rms_norm(total.astype(ops.dtype), np.ones(8, ops.dtype), 1e-5)
    assert ops.download(ops.rms_norm(partials, ones, 1e-5)).tobytes() == normed.tobytes()


def test_columns_of_a_rank_take_inputs_of_all(rng):
    """Input orders of GPTQ's desc_act, for one matrix and for one of each expert."""
    ops, x, order = group_of(2), floats(rng, 3, 64), rng.permutation(64).astype(np.int32)
    whole = Weight(
        rng.integers(0, 256, (8, 32)).astype(np.uint8), WeightFormat.INT4, floats(rng, 8, 4), group_size=16,
        input_order=order,
    )  # fmt: skip
    inputs, columns = Split(1, (Section(64),)), Split(1, (Section(4),))
    parts = replace(
        whole,
        data=replace(split_on(ops, whole.data, Split(1, (Section(32),))), split=inputs),
        scale=split_on(ops, whole.scale, columns),
        input_order=split_on(ops, order, Split(0, (Section(64),))),
    )
    divided_x = split_on(ops, x, inputs)
    product = ops.linear(divided_x, parts)
    assert isinstance(product, PartialSums)
    np.testing.assert_allclose(sum(product.parts), ONE.linear(x, whole), rtol=1e-4, atol=1e-4)
    order_of_one = GroupArray(tuple(part[None] for part in parts.input_order.parts))
    expert = replace(parts, data=parts.data[None], scale=parts.scale[None], input_order=order_of_one)
    groups = ops.group_by_expert(ops.upload(np.zeros((3, 1), np.int32)), 1)
    experts = ops.experts_linear(divided_x, expert, groups)
    np.testing.assert_allclose(sum(experts.parts), ONE.linear(x, whole), rtol=1e-4, atol=1e-4)


def test_gated_experts_take_inputs_of_all(rng):
    """The columns of down, as GPTQ's desc_act orders them."""
    ops, x, order = group_of(2), floats(rng, 3, 8), rng.permutation(64).astype(np.int32)
    gate_up, codes = Weight(floats(rng, 1, 128, 8)), rng.integers(0, 256, (1, 8, 32)).astype(np.uint8)
    down = Weight(codes, WeightFormat.INT4, floats(rng, 1, 8, 4), group_size=16, input_order=order[None])
    rows, columns = Split(1, (Section(64), Section(64))), Split(1, (Section(64),))
    own_gate_up = Weight(replace(split_on(ops, gate_up.data, rows), split=replace(rows, axis=0)))
    own_down = replace(
        down,
        data=replace(split_on(ops, codes, Split(2, (Section(32),))), split=columns),
        scale=split_on(ops, down.scale, Split(2, (Section(4),))),
        input_order=split_on(ops, order[None], columns),
    )
    ids, weights = np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    expected = ONE.gated_experts(x, gate_up, down, ONE.group_by_expert(ids, 1), weights)
    groups = ops.group_by_expert(ops.upload(ids), 1)
    gated = ops.gated_experts(ops.upload(x), own_gate_up, own_down, groups, ops.upload(weights))
    np.testing.assert_allclose(sum(gated.parts), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["rms_norm_quantised", "add_rms_norm_quantised"])
def test_quantising_norms_take_sums(rng, name: str):
    ops, parts, ones = group_of(2), [floats(rng, 3, 8) for _ in range(2)], np.ones(8, np.float32)
    residual = [floats(rng, 3, 8)] if name.startswith("add") else []
    rows = getattr(ops, name)(PartialSums(tuple(parts)), *map(ops.upload, residual), ops.upload(ones), 1e-5)
    expected = getattr(ONE, name)(parts[0] + parts[1], *residual, ones, 1e-5)
    np.testing.assert_array_equal(ops.download(rows.data), expected.data)
    np.testing.assert_array_equal(ops.download(rows.scale), expected.scale)


def test_no_other_operation_takes_partial_sums(rng):
    ops, partials = group_of(2), PartialSums((floats(rng, 2, 4), floats(rng, 2, 4)))
    for work in (lambda: ops.silu_mul(partials), lambda: ops.quantise_rows(partials), lambda: ops.download(partials)):
        with pytest.raises(TypeError, match="partial sums"):
            work()


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_norms_over_the_heads_of_all_ranks(rng, num_kv_heads: int):
    ops, q_size, k_size = group_of(4), 8 * 4, num_kv_heads * 4
    qkv, norms = floats(rng, 5, q_size + 2 * k_size), (floats(rng, q_size), floats(rng, k_size))
    keys = Section(k_size, 4 // num_kv_heads)
    parts = split_on(ops, qkv, Split(1, (Section(q_size), keys, keys)))
    ops.normalise_qk(parts, *map(ops.upload, norms), 1e-5)
    ONE.normalise_qk(qkv, *norms, 1e-5)
    np.testing.assert_array_equal(ops.download(parts), qkv)


@pytest.mark.parametrize(("num_ranks", "vocab"), [(2, 1600), (4, 1003)])
def test_tokens_and_logprobs_match_one_rank(rng, num_ranks: int, vocab: int):
    ops, logits = group_of(num_ranks), 4 * floats(rng, 24, vocab)
    logits[1] = np.nan
    logits[2, ::2] = logits[2].max()  # ties go to the lower id
    fixed = {
        "penalties": random_penalties(rng, 24, vocab),
        "bias": random_bias(rng, 24, vocab),
        "mask": random_mask(rng, 24, vocab),
    }
    parts = split_on(ops, logits, Split(1, (Section(vocab),)))
    for kept in ({}, fixed, {"with_logprobs": True, "num_logprobs": 5}, {"adjusts_logprobs": True} | fixed):
        options = random_options(rng, 24, vocab, **kept)
        sampled, expected = ops.sample(parts, uploaded(options, ops.upload)), ONE.sample(logits, options)
        for name, array in vars(expected).items():
            if array is not None:
                assert ops.download(getattr(sampled, name)).tobytes() == array.tobytes(), name
    ids = rng.integers(0, vocab, 24).astype(np.int32)
    for ours, theirs in zip(ops.top_logprobs(parts, ops.upload(ids), 3), ONE.top_logprobs(logits, ids, 3), strict=True):
        assert ops.download(ours).tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("num_ranks", "vocab"), [(2, 1600), (8, 1003)])
def test_the_best_of_the_parts_is_the_whole_s(rng, monkeypatch, num_ranks: int, vocab: int):
    ops, logits = group_of(num_ranks), 4 * floats(rng, 64, vocab)
    monkeypatch.setattr(ops, "_gathered", None)  # no logits are gathered
    logits[0, 7] = np.nan
    logits[1] = -np.inf
    logits[2, vocab - 1] = np.inf
    logits[3, ::2] = logits[3].max()
    logits[4, : vocab // 2] = -np.inf
    logits[5:12] *= np.float32(1e30)  # overflows once divided by a low temperature
    logits[8:12] -= np.abs(logits[8:12]).max()
    off = {"top_k": np.full(64, 2**31 - 1, np.int32), "top_p": np.ones(64, np.float32), "has_thresholds": False}
    off["min_p"] = np.zeros(64, np.float32)
    temperature = rng.choice(np.array([0, 1e-30, 1e-9, 0.7, 1], np.float32), 64)
    parts, out = split_on(ops, logits, Split(1, (Section(vocab),))), ops.empty((64,), np.dtype(np.int32))
    penalties, bias = random_penalties(rng, 64, vocab), random_bias(rng, 64, vocab)
    for shaped in ({}, {"penalties": penalties, "bias": bias}):
        options = random_options(rng, 64, vocab, temperature=temperature, **off, **shaped)
        sampled, expected = ops.sample(parts, uploaded(options, ops.upload), out), ONE.sample(logits, options)
        np.testing.assert_array_equal(ops.download(sampled.is_nan), expected.is_nan)
        np.testing.assert_array_equal(ops.download(sampled.token_ids), expected.token_ids)
        np.testing.assert_array_equal(ops.download(out), expected.token_ids)


def test_rows_of_logits_stay_divided(rng):
    ops, logits = group_of(2), floats(rng, 4, 10)
    rows = ops.gather_rows(split_on(ops, logits, Split(1, (Section(10),))), ops.upload(np.array([3, 1], np.int32)))
    assert isinstance(rows, SplitArray)
    np.testing.assert_array_equal(ops.download(rows), logits[[3, 1]])
