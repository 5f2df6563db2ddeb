"""Attention launches, without a GPU: tiles that fit every architecture, grids from host integers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from model.ops.gpu.attention.paged import decode_attention, plan_decode_attention, prefill_attention
from model.ops.interface import NO_WINDOW, AttentionBatch

SMALLEST_SHARED_LIMIT_BYTES = 99 << 10  # a block's on sm_86, sm_89 and sm_120
HOPPER_SHARED_LIMIT_BYTES = 227 << 10
FP32, BF16 = 0, 2


class RecordingOps:
    """Keeps the last launch instead of making it."""

    num_sms = 132
    stream = None

    def __init__(self, dtype_code: int, arch: str = "80"):
        self.dtype_code, self.arch = dtype_code, arch
        self.tensor_maps = SimpleNamespace(get=lambda array, sizes, box, item_bytes=2: (sizes, box))
        self.kernels = SimpleNamespace(get=self._get)
        self.temporaries = []
        self.build, self.grid, self.block, self.shared_bytes, self.cluster = None, None, None, None, None
        self.args = ()

    def temporary(self, shape, dtype):
        self.temporaries.append(shape)
        return np.empty(shape, dtype)

    def most_clusters(self, name, cluster, *, threads, shared_bytes, **defines):
        """Clusters that an H200 runs at once: some of its units of up to 18 multiprocessors lack a few."""
        return {8: 15, 7: 15, 6: 17, 5: 22, 4: 30, 3: 39, 2: 66}[cluster]

    def launch(
        self, name, grid, args, *, threads, shared_bytes=0, overlaps=False, shared_percent=0, cluster=1, **defines
    ):
        self.cluster = cluster
        waits = ("paged_decode", "paged_decode_exact", "paged_prefill_sm90", "paged_prefill_short_sm90")
        assert overlaps == (name in waits), "only these wait for the kernel ahead"
        defines["QUIRE_DTYPE"] = self.dtype_code
        self.kernels.get(name, shared_bytes=shared_bytes, **defines)(grid, (threads,), args, shared_bytes, self.stream)

    def _get(self, name, *, shared_bytes, **defines):
        self.build = (name, defines)

        def launch(grid, block, args, shared_mem, stream):
            assert shared_mem == shared_bytes
            assert not any(type(argument) in (int, float) for argument in args), "a plain number has no C width"
            self.grid, self.block, self.shared_bytes, self.args = grid, block, shared_mem, args

        return launch


def decoded(
    dtype_code=BF16,
    num_sequences=1,
    heads=(32, 8),
    head_dim=128,
    max_blocks=2048,
    window=NO_WINDOW,
    kv_dtype=np.float32,
):
    ops = RecordingOps(dtype_code)
    q = np.empty((num_sequences, heads[0], head_dim), np.float32)
    kv = np.empty((1, 1, 2, heads[1], 16, head_dim), kv_dtype)
    tables = np.empty((num_sequences, max_blocks), np.int32)
    decode_attention(ops, q, AttentionBatch(kv, 0, tables, np.empty(num_sequences, np.int32), 0.1, window), q)
    return ops


def prefilled(dtype_code=BF16, chunks=(4096,), heads=(32, 8), head_dim=128, arch="80", kv_dtype=np.float32):
    ops = RecordingOps(dtype_code, arch)
    q = np.empty((sum(chunks), heads[0], head_dim), np.float32)
    kv = np.empty((1, 1, 2, heads[1], 16, head_dim), kv_dtype)
    tables, lens = np.empty((len(chunks), 256), np.int32), np.empty(len(chunks), np.int32)
    start = np.empty(len(chunks) + 1, np.int32)
    prefill_attention(ops, q, AttentionBatch(kv, 0, tables, lens, 0.1, NO_WINDOW, start, max(chunks)), q)
    return ops


@pytest.mark.parametrize("dtype_code", [FP32, BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [np.float32, np.uint8])
def test_tiles_fit_every_architecture(dtype_code, head_dim, kv_dtype):
    assert decoded(dtype_code, head_dim=head_dim, kv_dtype=kv_dtype).shared_bytes <= SMALLEST_SHARED_LIMIT_BYTES
    for chunks in ((1,), (4096,)):
        prefill = prefilled(dtype_code, chunks, head_dim=head_dim, kv_dtype=kv_dtype)
        assert prefill.shared_bytes <= SMALLEST_SHARED_LIMIT_BYTES


@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (16, 1), (28, 4)])
def test_four_blocks_of_an_e4m3_cache_fit_a_multiprocessor(heads):
    build = decoded(num_sequences=16, heads=heads, kv_dtype=np.uint8).build[1]
    assert build["QUIRE_KV_FP8"] == 1
    assert build["CTAS_PER_SM"] * (build["SHARED_BYTES"] + 1024) <= HOPPER_SHARED_LIMIT_BYTES
    assert "QUIRE_KV_FP8" not in decoded(num_sequences=16, heads=heads).build[1]


@pytest.mark.parametrize("chunk", [64, 4096])
def test_prefill_on_hopper_holds_tiles_of_bytes_in_addition(chunk):
    sixteen, eight = (prefilled(arch="90a", chunks=(chunk,), kv_dtype=dtype) for dtype in (np.float32, np.uint8))
    assert sixteen.shared_bytes < eight.shared_bytes <= HOPPER_SHARED_LIMIT_BYTES
    assert eight.build[0] == sixteen.build[0]
    assert eight.build[1]["FETCHED_STAGES"] > 2


def test_a_sequence_can_be_cut_to_fill_the_device_twice():
    ops = decoded(max_blocks=2048)
    assert ops.grid == (8, 33)
    assert ops.temporaries == [(33, 8), (32 * 33, 128), (32 * 33, 2)]


def test_many_sequences_leave_room_to_cut_the_long_ones():
    ops = decoded(num_sequences=128, window=30000)  # which hides tokens: nothing is read together
    assert ops.grid == (8, 128 + 2 * 33)
    assert ops.temporaries == [(194, 8), (32 * 194, 128), (32 * 194, 2)]


def test_groups_of_eight_have_parts_members_and_results_of_their_own():
    ops = decoded(num_sequences=128)
    num_groups = 128 // 8 + 8
    assert ops.grid == (8, 128 + 2 * 33 + num_groups)
    num_results = 128 + 2 * 33 + 8 * (num_groups + 33)
    assert ops.temporaries == [
        (128 + 2 * 33 + num_groups + num_groups * 8 // 2, 8),
        (32 * num_results, 128),
        (32 * num_results, 2),
    ]
    assert ops.build[1]["MEMBERS"] == 8


@pytest.mark.parametrize(("heads", "head_dim", "members"), [((64, 8), 128, 4), ((32, 8), 64, 4), ((32, 2), 128, 2)])
def test_a_group_has_as_many_members_as_the_registers_hold(heads, head_dim, members):
    assert decoded(num_sequences=16, heads=heads, head_dim=head_dim).build[1]["MEMBERS"] == members


@pytest.mark.parametrize("what", [{"num_sequences": 1025}, {"max_blocks": 16}, {"heads": (32, 2), "head_dim": 256}])
def test_nothing_is_read_together_where_it_cannot_be(what):
    ops = decoded(**{"num_sequences": 16, **what})
    assert len(ops.temporaries[0]) == 2
    assert ops.temporaries[0][0] == ops.grid[1]


def test_more_sequences_than_counters_are_not_cut_and_need_no_workspace():
    ops = decoded(num_sequences=2049)
    assert ops.grid == (8, 2049)
    assert ops.temporaries == [(2049, 8), (0, 128), (0, 2)]


def test_a_plan_that_is_given_is_not_made_again():
    ops, q = RecordingOps(BF16), np.empty((2, 32, 128), np.float32)
    kv, tables, lens = np.empty((1, 1, 2, 8, 16, 128), np.float32), np.empty((2, 64), np.int32), np.empty(2, np.int32)
    batch = AttentionBatch(kv, 0, tables, lens, 0.1)
    plan = plan_decode_attention(ops, 32, batch)
    assert ops.build[0] == "plan_decode"
    assert ops.grid == (1,)
    decode_attention(ops, q, replace(batch, plan=plan), q)
    assert ops.build[0] == "paged_decode"
    num_results = 2 * 8 + 2 * 33
    assert ops.grid[1] == 2 * 8 + 1
    assert len(plan) == 2 * 8 + 1 + 8 // 2
    assert ops.temporaries == [(21, 8), (32 * num_results, 128), (32 * num_results, 2)]


def exact_plan(num_rows, heads=(32, 8), max_blocks=2048):
    """Slots, rows of the members, partial results, stripes."""
    ops, kv = RecordingOps(BF16), np.empty((1, 1, 2, heads[1], 16, 128), np.float32)
    q = np.empty((num_rows, heads[0], 128), np.float32)
    tables, lens = np.empty((num_rows, max_blocks), np.int32), np.empty(num_rows, np.int32)
    batch = AttentionBatch(kv, 0, tables, lens, 0.1, exact=True)
    plan = plan_decode_attention(ops, heads[0], batch)
    assert ops.build[0] == "plan_exact_rows"
    num_slots = int(ops.args[4])
    decode_attention(ops, q, replace(batch, plan=plan), q)
    assert ops.build[0] == "paged_decode_exact"
    assert int(ops.args[-1]) == num_slots
    return num_slots, len(plan) - num_slots, ops.temporaries[1][0] // heads[0], ops.grid[1]


def test_exact_rows_have_slots_for_all_their_splits_on_blocks_that_run_at_once():
    assert exact_plan(2) == (2 * 33, 1, 2 * 33, 33)
    assert exact_plan(24) == (24 * 33, 12, 24 * 33, 33)
    assert exact_plan(8, max_blocks=32) == (8 * 4, 4, 8 * 4, 32)
    assert exact_plan(8, max_blocks=8) == (8, 4, 0, 8)  # nothing to split
    assert exact_plan(3, heads=(4, 1)) == (3 * 256, 2, 3 * 256, 264)


def drafted_plan(num_rows, heads=(32, 8), max_blocks=2048):
    """Return num_slots, stripes, workspace rows and kernel of the attention; THREADS of the plan."""
    ops = RecordingOps(BF16)
    q, kv = np.empty((num_rows, heads[0], 128), np.float32), np.empty((1, 1, 2, heads[1], 16, 128), np.float32)
    tables, lens = np.empty((num_rows, max_blocks), np.int32), np.empty(num_rows, np.int32)
    batch = AttentionBatch(kv, 0, tables, lens, 0.1, drafted=True)
    plan = plan_decode_attention(ops, heads[0], batch)
    threads = ops.build[1].get("THREADS")
    decode_attention(ops, q, replace(batch, plan=plan), q)
    return len(plan), ops.grid[1], ops.temporaries[-2][0] // heads[0], ops.build[0], threads


def test_rows_with_drafts_have_slots_for_groups_and_their_splits():
    assert drafted_plan(48) == (48 + 66 + 24, 48 + 66, 48 + 6 * 66, "paged_decode_exact", 64)
    assert drafted_plan(256)[3:] == ("paged_decode_exact", 256)
    assert drafted_plan(2000)[3:] == ("paged_decode", None)
    assert drafted_plan(1)[3:] == ("paged_decode", None)


@pytest.mark.parametrize(("heads", "members"), [((32, 8), 6), ((64, 8), 3), ((16, 1), 2), ((8, 8), 8)])
def test_exact_groups_have_24_query_rows_or_two_members(heads, members):
    ops, kv = RecordingOps(BF16), np.empty((1, 1, 2, heads[1], 16, 128), np.float32)
    tables, lens = np.empty((9, 64), np.int32), np.empty(9, np.int32)
    q = np.empty((9, heads[0], 128), np.float32)
    decode_attention(ops, q, AttentionBatch(kv, 0, tables, lens, 0.1, exact=True), q)
    assert ops.build[1]["MEMBERS"] == members


def exact_build(num_rows=9, arch="90a", heads=(32, 8), head_dim=128, kv_dtype=np.float32, dtype_code=BF16):
    ops, kv = RecordingOps(dtype_code, arch), np.empty((1, 1, 2, heads[1], 16, head_dim), kv_dtype)
    tables, lens = np.empty((num_rows, 64), np.int32), np.empty(num_rows, np.int32)
    q = np.empty((num_rows, heads[0], head_dim), np.float32)
    decode_attention(ops, q, AttentionBatch(kv, 0, tables, lens, 0.1, exact=True), q)
    return ops.build[1]


def test_exact_blocks_keep_tiles_for_a_second_group_where_two_fit_a_multiprocessor():
    kept = exact_build()
    assert (kept["STAGES"], kept["KEPT_STAGES"]) == (3, 2)
    assert 2 * (kept["SHARED_BYTES"] + 1024) <= 228 << 10
    few = exact_build(6)
    assert (few["STAGES"], few["SHARED_BYTES"]) == (2, 64 << 10)
    for other in (
        {"arch": "80"},
        {"heads": (16, 1)},  # 32 query rows
        {"head_dim": 64},
        {"kv_dtype": np.uint8},
        {"dtype_code": FP32},
    ):
        assert "KEPT_STAGES" not in exact_build(**{"arch": "90a", **other})


def test_parts_are_not_shorter_than_they_are_worth():
    assert decoded(max_blocks=32).grid == (8, 4)  # 512 tokens
    assert decoded(max_blocks=2048, window=200).grid == (8, 2)
    assert decoded(max_blocks=2048, window=256).grid == (8, 3)  # begins within a tile


def test_parts_of_one_kv_head_stay_within_the_memory_for_their_weights():
    ops = decoded(heads=(4, 1), max_blocks=8192)
    assert ops.grid == (1, 264)
    assert ops.build[1]["MAX_SPLITS"] == 256


def test_a_large_group_is_shared_by_several_blocks():
    window = 30000
    assert decoded(num_sequences=128, heads=(40, 2), window=window).grid == (4, 128 + 2 * 66)
    assert decoded(FP32, num_sequences=128, heads=(32, 8), window=window).grid == (32, 128 + 2 * 8)


def test_prefill_packs_the_heads_of_a_group_into_its_rows():
    assert prefilled().grid == (8, 1, 128)
    assert prefilled(chunks=(100, 7, 64)).grid == (8, 3, 4)
    assert prefilled(chunks=(16, 3)).grid == (8, 2, 1)
    assert prefilled(chunks=(16, 3)).build[1]["ROW_TILES"] == 1


def test_prefill_on_hopper_is_a_grid_that_stays():
    assert prefilled(arch="90a").build[0] == "paged_prefill_sm90"
    assert prefilled(arch="90a").grid == (132,)
    assert prefilled(arch="90a", chunks=(600, 7)).grid == (132,)
    assert prefilled(arch="90a").temporaries == [(132, 192, 128), (132, 192, 2)]
    assert prefilled(arch="90a").shared_bytes <= HOPPER_SHARED_LIMIT_BYTES


@pytest.mark.parametrize(("chunk", "cluster", "grid"), [(64, 6, 102), (32, 8, 120), (128, 3, 117), (160, 2, 132)])
def test_a_short_prefill_on_hopper_is_a_cluster_a_piece(chunk, cluster, grid):
    short = prefilled(arch="90a", chunks=(chunk,))
    assert short.build[0] == "paged_prefill_short_sm90"
    assert (short.cluster, short.grid) == (cluster, (grid,))
    assert short.shared_bytes <= HOPPER_SHARED_LIMIT_BYTES
    assert prefilled(arch="90a", chunks=(chunk,), head_dim=64).shared_bytes < short.shared_bytes


def test_pieces_beyond_any_number_of_clusters_take_a_block_each():
    many = prefilled(arch="90a", chunks=(64,), heads=(512, 128))
    assert many.build[0] == "paged_prefill_sm90"
    assert prefilled(arch="90a", chunks=(100, 7, 64)).build[0] == "paged_prefill_sm90"


@pytest.mark.parametrize("what", [{"dtype_code": FP32}, {"head_dim": 96}, {"chunks": (16, 3)}], ids=str)
def test_prefill_on_hopper_leaves_what_does_not_suit_it(what):
    assert prefilled(arch="90a", **what).build[0] == "paged_prefill"


def test_no_rows_are_no_launch():
    assert decoded(num_sequences=0).grid is None
    assert prefilled(chunks=(0,)).grid is None


@pytest.mark.parametrize("head_dim", [80, 256])
def test_the_kernels_agree_on_the_shared_memory(head_dim):
    kernels = pytest.importorskip(
        "model.ops.gpu.kernels", reason="needs the packages of the cuda extra", exc_type=ImportError
    )
    for ops in (decoded(head_dim=head_dim), prefilled(head_dim=head_dim)):
        name, defines = ops.build
        assert kernels.compile_cubin(name, "86", defines).startswith(b"\x7fELF")
