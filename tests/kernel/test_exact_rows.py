"""`exact_rows`: products and whole steps whose rows have the bits of a batch of one."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import ModelConfig
from model.cuda_graphs import StepGraphs
from model.kv_cache import allocate
from model.ops.interface import MAX_EXACT_ROWS, Array
from model.ops.weight import Weight, WeightFormat
from model.step_inputs import ForwardInputs
from model.weights.loader import load_model
from tests.support.demo_engine import DEMO
from tests.support.fp8_checks import as_weight, random_rows, upload
from tests.support.int4_checks import random_int4, upload_int4
from tests.support.kernel_checks import normal
from tests.support.w8_checks import KINDS, random_w8, upload_w8

pytestmark = pytest.mark.gpu

NUM_ROWS = (2, 5, 8, 9, 16, 17, MAX_EXACT_ROWS)
MOST_QUANTISED = 16
BLOCK_SIZE, MAX_BLOCKS = 16, 40


@pytest.fixture
def gemv_ops(open_ops, monkeypatch):
    """The build of gemv for one row -> the backend in bfloat16."""
    tuning = pytest.importorskip("model.ops.gpu.gemm_tuning", reason="needs the packages of the cuda extra")

    def open_(build: int = 0):
        class FewByGemv(dict):
            def __contains__(self, shape):  # nothing is measured anew
                return True

            def get(self, shape, default=None):
                return tuning.GemmAlgorithm(tuning.GEMV, build) if shape.m <= 8 else default

        ops = open_ops("bfloat16")
        monkeypatch.setattr(ops._linear, "_tuning", FewByGemv(any=0))
        return ops

    return open_


def assert_rows_are_exact(ops, x: Array, weight: Weight, most: int = MAX_EXACT_ROWS) -> None:
    for dtype in (ops.dtype, np.dtype(np.float32)):
        with ops.scratch():
            alone = [ops.download(ops.linear(x[row : row + 1], weight, dtype=dtype)) for row in range(most)]
            for count in NUM_ROWS:
                if count <= most:
                    with ops.exact_rows():
                        together = ops.download(ops.linear(x[:count], weight, dtype=dtype))
                    np.testing.assert_array_equal(together.view(np.uint8), np.concatenate(alone[:count]).view(np.uint8))


@pytest.mark.parametrize("build", [0, 1, 2])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (64, 264), (4096, 14336)])
def test_gated_rows_are_single_rows(gemv_ops, rng, build, n, k):
    ops = gemv_ops(build)
    x, weight = normal(rng, (MAX_EXACT_ROWS, k), "bfloat16"), ops.upload(normal(rng, (n, k), "bfloat16", scale=k**-0.5))
    whole = [ops.upload(row) for row in x]  # each aligned as a batch of one is
    alone = []
    for row in whole:
        with ops.scratch():
            alone.append(ops.download(ops.silu_mul(ops.linear(row.reshape(1, k), Weight(weight)))))
    for count in NUM_ROWS:
        with ops.scratch():
            out = ops.temporary((count, n // 2), ops.dtype)
            assert ops._linear.gated(ops.upload(x[:count]), weight, out)
            together = ops.download(out)
        np.testing.assert_array_equal(together.view(np.uint16), np.concatenate(alone[:count]).view(np.uint16))


@pytest.mark.parametrize("build", [0, 1, 2])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1000, 264)])
def test_dense_products(gemv_ops, rng, build, n, k):
    ops = gemv_ops(build)
    x, weight = normal(rng, (MAX_EXACT_ROWS, k), "bfloat16"), normal(rng, (n, k), "bfloat16", scale=k**-0.5)
    whole = [ops.upload(x[row]) for row in range(len(x))]  # each aligned as a batch of one is
    on_device = Weight(ops.upload(weight))
    for count in NUM_ROWS:
        with ops.scratch():
            alone = [ops.download(ops.linear(one.reshape(1, k), on_device)) for one in whole[:count]]
            with ops.exact_rows():
                together = ops.download(ops.linear(ops.upload(x[:count]), on_device))
        np.testing.assert_array_equal(together.view(np.uint16), np.concatenate(alone).view(np.uint16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1008, 272)])
def test_products_of_8_bit_weights(open_ops, rng, kind, n, k):
    ops = open_ops("bfloat16")
    x, weight = ops.upload(normal(rng, (MAX_EXACT_ROWS, k), "bfloat16")), upload_w8(ops, random_w8(rng, n, k, kind))
    assert_rows_are_exact(ops, x, weight, MOST_QUANTISED)


def test_products_of_e4m3_rows(open_hopper_ops, rng):
    ops, (n, k) = open_hopper_ops("bfloat16"), (6144, 4096)
    x, weight = normal(rng, (MAX_EXACT_ROWS, k), "bfloat16"), as_weight(upload(ops, random_rows(rng, n, k)))
    assert weight.format is WeightFormat.FP8
    for count in NUM_ROWS:
        with ops.scratch(), ops.exact_rows():
            together = ops.download(ops.linear(ops.quantise_rows(ops.upload(x[:count])), weight))
            alone = [ops.download(ops.linear(ops.quantise_rows(ops.upload(x[[row]])), weight)) for row in range(count)]
        np.testing.assert_array_equal(together.view(np.uint16), np.concatenate(alone).view(np.uint16))


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1008, 1152), (4096, 14336)])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_of_4_bit_weights(open_ops, rng, n, k, has_zeros):
    ops = open_ops("bfloat16")
    weight = ops.prepare_weight(upload_int4(ops, random_int4(rng, (n, k), 128, has_zeros=has_zeros)))
    assert weight.format is WeightFormat.INT4_TILED
    x = ops.upload(normal(rng, (MAX_EXACT_ROWS, k), "bfloat16"))
    assert_rows_are_exact(ops, x, weight, MOST_QUANTISED)


def drafted(table: np.ndarray, token_ids: np.ndarray, start: int) -> ForwardInputs:
    """A decode at `start` and its drafts."""
    count = len(token_ids)
    positions = np.arange(start, start + count, dtype=np.int32)
    return ForwardInputs(
        token_ids=token_ids,
        pending_token_row=np.full(count, MAX_EXACT_ROWS, np.int32),
        positions=positions,
        slots=table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        context_lens=positions + 1,
        logit_rows=np.arange(count, dtype=np.int32),
        num_decodes=count,
        tables=np.repeat(table[None], count, axis=0),
        dirty_tables=np.ones(count, np.bool_),
        chunk_lens=np.zeros(0, np.int32),
        chunk_tables=[],
        num_draft_rows=count if count > 1 else 0,
    )


@pytest.mark.parametrize("start", [3, 126, 300, 600])
@pytest.mark.parametrize("num_rows", [2, 5, 9, 17])
def test_a_captured_step_gives_each_row_the_logits_of_its_own_step(gemv_ops, rng, start, num_rows):
    ops = gemv_ops()
    model = load_model(DEMO, ModelConfig.read(DEMO), ops, MAX_BLOCKS * BLOCK_SIZE)
    kv = allocate(ops, model.config, MAX_BLOCKS, BLOCK_SIZE)
    known = normal(rng, kv.shape, "bfloat16")
    sampled = ops.upload(np.zeros(MAX_EXACT_ROWS, np.int32))
    graphs = StepGraphs(model, sampled, MAX_EXACT_ROWS, MAX_BLOCKS, verifies_drafts=True)
    ops.is_poisoning = False  # a captured poison would be part of each step
    try:
        graphs.capture(kv)
        table = rng.permutation(MAX_BLOCKS).astype(np.int32)
        token_ids = rng.integers(5, model.config.vocab_size, num_rows).astype(np.int32)
        with ops.stream:
            kv.set(known)
        together = ops.download(graphs.forward(drafted(table, token_ids, start)))
        written = ops.download(kv)
        with ops.stream:
            kv.set(known)
        for row in range(num_rows):
            alone = ops.download(graphs.forward(drafted(table, token_ids[row : row + 1], start + row)))
            np.testing.assert_array_equal(together[row].view(np.uint32), alone[0].view(np.uint32))
        np.testing.assert_array_equal(ops.download(kv).view(np.uint16), written.view(np.uint16))
        assert len(graphs.decode_seconds()) == MAX_EXACT_ROWS
    finally:
        ops.is_poisoning = True
