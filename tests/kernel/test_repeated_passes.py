"""Captured passes of Llama-3.1-8B's layers: every replay and every capture gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.batch import Batch
from model.kv_cache import allocate
from model.presets import PRESETS
from model.weights.loader import load_model
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.gpu

NUM_ROWS = (1, 2, 4, 6, 8, 12, 16, 24)
CONTEXT, BLOCK_SIZE = 1100, 16
NUM_LAYERS, CAPTURES, REPLAYS = 2, 3, 20


@pytest.fixture(scope="module")
def model(open_ops):
    config = replace(PRESETS["llama-3.1-8b"], num_layers=NUM_LAYERS, vocab_size=4096)
    model = load_model(None, config, open_ops("bfloat16"), 2048, load_format="dummy")
    model.tune(list(NUM_ROWS), list(NUM_ROWS))
    return model


def decodes(ops, num_rows: int) -> Batch:
    """Return a step of decodes with blocks of their own."""
    lens = CONTEXT - 3 * np.arange(num_rows, dtype=np.int32)
    blocks = -(-CONTEXT // BLOCK_SIZE)
    tables = np.arange(num_rows * blocks, dtype=np.int32).reshape(num_rows, blocks)
    positions = lens - 1
    slots = tables[np.arange(num_rows), positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    token_ids = 7 + 77 * np.arange(num_rows, dtype=np.int32)
    return Batch(
        token_ids=ops.upload(token_ids),
        positions=ops.upload(positions),
        slots=ops.upload(slots),
        block_tables=ops.upload(tables),
        context_lens=ops.upload(lens),
        query_start=ops.upload(np.array([num_rows], np.int32)),
        logit_rows=None,
        num_decodes=num_rows,
        num_tokens=num_rows,
        num_sequences=num_rows,
        max_query_len=0,
        has_drafts=False,
    )


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_replays_and_captures_give_the_same_logits(model, rng, monkeypatch, num_rows):
    ops = model.ops
    monkeypatch.setattr(ops, "is_poisoning", False)  # kernels overlap as in an engine
    kv = allocate(ops, model.config, num_rows * -(-CONTEXT // BLOCK_SIZE), BLOCK_SIZE)
    values = normal(rng, kv.shape, "bfloat16")
    kv.data.copy_from_host_async(values.ctypes.data, values.nbytes, ops.stream)
    batch, out = decodes(ops, num_rows), ops.empty((num_rows, model.config.vocab_size), np.dtype(np.float32))

    def forward():
        with ops.scratch():
            model.forward(batch, kv, out)

    logits = []
    for _ in range(CAPTURES):
        replay = ops.capture(forward)
        for _ in range(REPLAYS):
            replay()
            replay()  # the next pass begins while this one ends
            logits.append(ops.download(out))
    assert np.isfinite(logits[0]).all()
    for again in logits[1:]:
        np.testing.assert_array_equal(again.view(np.uint32), logits[0].view(np.uint32))
