"""The plan of decode attention: every token of every sequence in one split, and no superfluous split."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from model.ops.gpu.attention.paged import split_decode
from model.ops.interface import NO_WINDOW, AttentionBatch
from tests.support.kernel_checks import seconds_of
from tests.support.paged_cache import captured

pytestmark = pytest.mark.gpu

TILE, MIN_SPLIT, MIN_COMMON, MEMBERS = 16, 128, 256, 8
SEQUENCE, FIRST, BEGIN, END, COUNT, FIRST_ROW, ROW, NUM_MEMBERS = range(8)
BLOCK_SIZE, MAX_BLOCKS, KV_HEADS, HEADS = 16, 1024, 8, 32


def plan_of(ops, lengths: list[int], window: int, tables: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Splits int32[num_slots, 8], members int32[groups, MEMBERS, 4]. Without `tables` no sequences share a block."""
    if tables is None:
        tables = np.arange(len(lengths) * MAX_BLOCKS, dtype=np.int32).reshape(-1, MAX_BLOCKS)
    kv = ops.empty((1, 1, 2, KV_HEADS, BLOCK_SIZE, 128), ops.dtype)
    with ops.scratch():
        arrays = ops.upload(tables), ops.upload(np.array(lengths, np.int32))
        plan = ops.download(ops.plan_decode_attention(HEADS, AttentionBatch(kv, 0, *arrays, window=window)))
    num_groups = split_decode(
        ops, HEADS, AttentionBatch(kv, 0, tables, np.array(lengths, np.int32), window=window)
    ).num_groups
    num_slots = len(plan) - num_groups * MEMBERS // 2
    return plan[:num_slots], plan[num_slots:].reshape(num_groups, MEMBERS, 4)


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
def test_splits_cover_the_visible_tokens_of_each_sequence_once(open_ops, rng, batch, window):
    lengths = batches(rng)[batch]
    plan, _ = plan_of(open_ops("bfloat16"), lengths, window)
    used = plan[plan[:, SEQUENCE] < len(lengths)]
    np.testing.assert_array_equal(used, plan[: len(used)])
    assert (plan[len(used) :, SEQUENCE] == len(lengths)).all()
    used = used[np.argsort(used[:, ROW])]
    np.testing.assert_array_equal(used[:, ROW], np.arange(len(used)))
    slot = 0
    for sequence, length in enumerate(lengths):
        first = max(0, length - window)
        splits = used[slot : slot + used[slot, COUNT]]
        assert (splits[:, SEQUENCE] == sequence).all()
        assert (splits[:, FIRST] == first).all()
        assert (splits[:, COUNT] == len(splits)).all()
        assert (splits[:, FIRST_ROW] == slot).all()
        np.testing.assert_array_equal(splits[:, ROW], slot + np.arange(len(splits)))
        assert (splits[:, NUM_MEMBERS] == 0).all()
        assert splits[0, BEGIN] == first // TILE * TILE
        assert splits[-1, END] == length
        np.testing.assert_array_equal(splits[1:, BEGIN], splits[:-1, END])
        assert (splits[:, BEGIN] % TILE == 0).all()
        assert len(splits) == 1 or (splits[:-1, END] - splits[:-1, BEGIN] >= MIN_SPLIT).all()
        slot += len(splits)
    assert slot == len(used)


def test_long_splits_precede_short_ones(open_ops, rng):
    lengths = [*rng.lognormal(6, 1, 300).astype(int).clip(1, 16000).tolist(), 12000]
    plan, _ = plan_of(open_ops("bfloat16"), lengths, NO_WINDOW)
    plan = plan[plan[:, SEQUENCE] < len(lengths)]
    sizes = plan[:, END] - plan[:, BEGIN]
    shortest_before = np.minimum.accumulate(sizes)
    assert (sizes <= shortest_before + sizes.max() // 32 + MIN_SPLIT).all()
    assert sizes.max() < 12000


def test_a_long_sequence_is_cut_to_fill_the_device_and_even_ones_stay_whole(open_ops):
    ops = open_ops("bfloat16")
    one, _ = plan_of(ops, [16000], NO_WINDOW)
    assert one[0, COUNT] * KV_HEADS >= ops.num_sms
    many, _ = plan_of(ops, [600] * 512, NO_WINDOW)
    assert (many[:512, COUNT] == 1).all()


def beginnings(rng: np.random.Generator, families: list[tuple[int, int]]) -> tuple[list[int], np.ndarray]:
    """(sequences, blocks in common) of each family -> lengths and tables, in random order. After the common blocks each
    has its own, and past its context's end anything."""
    tables = np.arange(sum(count for count, _ in families) * MAX_BLOCKS, dtype=np.int32).reshape(-1, MAX_BLOCKS)
    lengths, row = [], 0
    for count, num_common in families:
        tables[row : row + count, :num_common] = tables[row, :num_common]
        lengths += (num_common * BLOCK_SIZE + rng.integers(1, 600, count)).tolist()
        row += count
    for table, length in zip(tables, lengths, strict=True):
        table[-(-length // BLOCK_SIZE) :] = rng.choice([0, -1, 7, 1 << 30])
    order = rng.permutation(len(lengths))
    return [lengths[at] for at in order], tables[order]


@pytest.mark.parametrize(
    "families",
    [
        [(2, 16)],
        [(64, 128)],
        [(8, 64)] * 32,
        [(1, 128), (3, 40), (9, 200), (17, 17)] + [(1, 3)] * 20,
        [(2, 100)] * 300,
        [(512, 20)],
        [(1000, 900)],
    ],
    ids=lambda families: f"{len(families)}_families_of_up_to_{max(families)[0]}",
)
def test_a_common_prefix_is_read_once_for_each_group(open_ops, rng, families):
    lengths, tables = beginnings(rng, families)
    plan, members = plan_of(open_ops("bfloat16"), lengths, NO_WINDOW, tables)
    used = plan[plan[:, SEQUENCE] < len(lengths)]
    np.testing.assert_array_equal(used, plan[: len(used)])
    num_reads = [np.zeros(length, np.int32) for length in lengths]
    results = [[] for _ in lengths]
    for split in used:
        read = tables[split[SEQUENCE], : -(-split[END] // BLOCK_SIZE)]
        group = members.reshape(-1, 4)[split[FIRST_ROW] :][: split[NUM_MEMBERS]] if split[NUM_MEMBERS] else None
        assert split[BEGIN] % TILE == 0
        if group is None:
            num_reads[split[SEQUENCE]][split[BEGIN] : split[END]] += 1
            results[split[SEQUENCE]].append((split[ROW], split[FIRST_ROW], split[COUNT]))
            continue
        assert split[NUM_MEMBERS] <= MEMBERS
        for sequence, count, first_row, _ in group:
            np.testing.assert_array_equal(tables[sequence, : len(read)], read)
            num_reads[sequence][split[BEGIN] : split[END]] += 1
            results[sequence].append((first_row + split[ROW], first_row, count))
    assert all((tokens == 1).all() for tokens in num_reads)
    rows = [sorted(each) for each in results]
    for each in rows:
        first = each[0][1]
        assert each == [(first + place, first, len(each)) for place in range(len(each))]
    taken = [row for each in rows for row, _, _ in each]
    assert len(set(taken)) == len(taken)


def test_a_system_prompt_is_read_once_for_eight(open_ops, rng):
    lengths, tables = beginnings(rng, [(64, 128)])
    plan, members = plan_of(open_ops("bfloat16"), lengths, NO_WINDOW, tables)
    in_common = plan[plan[:, NUM_MEMBERS] > 0]
    assert (in_common[:, NUM_MEMBERS] == MEMBERS).all()
    assert (in_common[:, END] - in_common[:, BEGIN]).sum() == 8 * 128 * BLOCK_SIZE
    assert sorted(members[:8, :, 0].ravel()) == list(range(64))


def test_fewer_blocks_in_common_than_it_pays_for_are_read_by_each(open_ops, rng):
    lengths, tables = beginnings(rng, [(30, MIN_COMMON // BLOCK_SIZE - 1)])
    plan, _ = plan_of(open_ops("bfloat16"), lengths, NO_WINDOW, tables)
    assert not plan[:, NUM_MEMBERS].any()


def test_speed(open_ops, rng):
    """It runs once per step and may take a few microseconds."""
    ops = open_ops("bfloat16")
    kv = ops.empty((1, 1, 2, KV_HEADS, BLOCK_SIZE, 128), ops.dtype)
    for name, families in (("none alike", [(1, 0)] * 512), ("all alike", [(512, 60)]), ("pairs", [(2, 60)] * 256)):
        lengths, tables = beginnings(rng, families)
        arrays = ops.upload(tables), ops.upload(np.array(lengths, np.int32))
        make = partial(ops.plan_decode_attention, HEADS, AttentionBatch(kv, 0, *arrays))
        seconds = seconds_of(ops, [captured(ops, [make] * 16)]) / 16
        print(f"plan_decode 512, {name}: {1e6 * seconds:.1f} us")
        assert seconds < 5e-5
