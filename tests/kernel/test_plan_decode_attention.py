"""What the plan of decode attention has to be: every token of every sequence in one part, and no part too many."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import NO_WINDOW
from tests.support.kernel_checks import seconds_of

pytestmark = pytest.mark.gpu

TILE, MIN_PART = 16, 128
SEQUENCE, FIRST, BEGIN, END, COUNT, FIRST_SLOT, SLOT = range(7)
BLOCK_SIZE, MAX_BLOCKS, KV_HEADS, HEADS = 16, 1024, 8, 32


def plan_of(ops, lengths: list[int], window: int) -> np.ndarray:
    """int32[num_slots, 8]"""
    kv = ops.empty((1, 1, 2, KV_HEADS, BLOCK_SIZE, 128), ops.dtype)
    tables = ops.empty((len(lengths), MAX_BLOCKS), np.dtype(np.int32))
    with ops.scratch():
        lens = ops.upload(np.array(lengths, np.int32))
        return ops.download(ops.plan_decode_attention(HEADS, kv, tables, lens, window))


def batches(rng: np.random.Generator) -> list[list[int]]:
    return [
        [1],
        [16000],
        [0, 0, 0],
        [7, 0, 16000, 128, 129],
        [1100] * 64,
        rng.integers(0, 700, 512).tolist(),
        rng.integers(0, 16384, 1500).tolist(),
        [3] * 1023 + [12000, 40, 9000],
    ]


@pytest.mark.parametrize("batch", range(8))
@pytest.mark.parametrize("window", [NO_WINDOW, 100, 4096])
def test_parts_cover_what_each_sequence_sees_once(open_ops, rng, batch, window):
    lengths = batches(rng)[batch]
    plan = plan_of(open_ops("bfloat16"), lengths, window)
    used = plan[plan[:, SEQUENCE] < len(lengths)]
    np.testing.assert_array_equal(used, plan[: len(used)])
    assert (plan[len(used) :, SEQUENCE] == len(lengths)).all()
    used = used[np.argsort(used[:, SLOT])]
    np.testing.assert_array_equal(used[:, SLOT], np.arange(len(used)))
    slot = 0
    for sequence, length in enumerate(lengths):
        first = max(0, length - window)
        parts = used[slot : slot + used[slot, COUNT]]
        assert (parts[:, SEQUENCE] == sequence).all()
        assert (parts[:, FIRST] == first).all()
        assert (parts[:, COUNT] == len(parts)).all()
        assert (parts[:, FIRST_SLOT] == slot).all()
        assert parts[0, BEGIN] == first // TILE * TILE
        assert parts[-1, END] == length
        np.testing.assert_array_equal(parts[1:, BEGIN], parts[:-1, END])
        assert (parts[:, BEGIN] % TILE == 0).all()
        assert len(parts) == 1 or (parts[:-1, END] - parts[:-1, BEGIN] >= MIN_PART).all()
        slot += len(parts)
    assert slot == len(used)


def test_long_parts_come_before_short_ones(open_ops, rng):
    lengths = [*rng.lognormal(6, 1, 300).astype(int).clip(1, 16000).tolist(), 12000]
    plan = plan_of(open_ops("bfloat16"), lengths, NO_WINDOW)
    plan = plan[plan[:, SEQUENCE] < len(lengths)]
    sizes = plan[:, END] - plan[:, BEGIN]
    shortest_before = np.minimum.accumulate(sizes)
    assert (sizes <= shortest_before + sizes.max() // 32 + MIN_PART).all()
    assert sizes.max() < 12000


def test_a_long_sequence_is_cut_to_fill_the_device_and_even_ones_stay_whole(open_ops):
    ops = open_ops("bfloat16")
    one = plan_of(ops, [16000], NO_WINDOW)
    assert one[0, COUNT] * KV_HEADS >= ops.num_sms
    many = plan_of(ops, [600] * 512, NO_WINDOW)
    assert (many[:512, COUNT] == 1).all()


def test_speed(open_ops, rng):
    """It stands once in a step: a few microseconds are what it may take."""
    ops = open_ops("bfloat16")
    kv = ops.empty((1, 1, 2, KV_HEADS, BLOCK_SIZE, 128), ops.dtype)
    tables = ops.empty((512, MAX_BLOCKS), np.dtype(np.int32))
    lens = ops.upload(rng.integers(1, 2000, 512).astype(np.int32))
    seconds = seconds_of(ops, [lambda: ops.plan_decode_attention(HEADS, kv, tables, lens, NO_WINDOW)] * 8)
    print(f"plan_decode_attention 512: {1e6 * seconds:.1f} us")
    assert seconds < 1e-4
