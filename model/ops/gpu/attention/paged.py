"""Launches the paged attention kernels. Grids depend on shapes alone, so that launches can be captured.

Only Hopper's kernels need more than the 99 KiB per block of sm_86, sm_89 and sm_120.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, AttentionBatch

_FP32 = 0

_DECODE_CTAS_PER_SM = 2
"""Decode blocks per SM of an H100 (96 KiB each); splits aim at one full wave."""

_FP8_CTAS_PER_SM = 4
"""Decode blocks per SM with an e4m3 cache (48 KiB and 128 registers per thread). More splits than for two blocks per SM
cost more than they save."""

_STAGES, _STAGES_ALONE = 3, 2
"""STAGES of the decode kernels, and of the kernel for a single sequence: with two it runs beside blocks of its
neighbours. H200, a pass of one token of Qwen3-30B-A3B at 1,117 tokens: 2,188 us instead of 2,214."""

_MIN_SPLIT_TOKENS = 128
"""Fewest tokens per split; shorter splits cost more than they save."""

_DECODE_TILE_TOKENS = 16
"""TILE of kv_split.cuh: a window starts at its first tile."""

_MAX_SPLITS = 256

_SPLIT_INTS, _MEMBER_INTS, _PLAN_THREADS, _WARP_SIZE = 8, 4, 1024, 32
"""Int32s of KvSplit and PrefixGroupMember (kv_split.cuh); THREADS of plan_decode.cu and most of plan_drafted_rows.cu;
threads of plan_exact_rows.cu."""

_MIN_COMMON_TOKENS = 256
"""Fewest tokens of a shared prefix that is read once."""

_MAX_MEMBERS, _MAX_GROUP_ROWS = 8, 32
"""Most members of a prefix group, and most query rows of its block: register limits of two blocks per SM at head_dim
128; half as many rows at 64 and 256."""

_MAX_EXACT_GROUP_ROWS = 24
"""Most query rows of an exact group's block, unless two members have more. H200, a step with 8 drafts at 4,096 tokens:
1.145 times one without drafts, 1.165 times with 40 rows (queries in shared memory)."""

_KEPT_STAGES, _MAX_KEPT_BYTES = 2, 113 << 10
"""Stages of an exact block's ring that hold a split of 128 tokens, and most bytes of a block if two are to fit an SM of
an H100."""

_MAX_PAIRS = 1 << 14
"""MAX_PAIRS of paged_decode.cu."""

_HOPPER_ROWS, _HOPPER_KEYS, _HOPPER_THREADS = 192, 128, 512
"""PADDED_ROWS, KEYS and THREADS of paged_prefill_sm90.cu."""

_SHORT_ROWS, _SHORT_KEYS, _SHORT_STAGES, _SHORT_THREADS = 128, 64, 4, 384
"""PADDED_ROWS, KEYS, STAGES and THREADS of paged_prefill_short_sm90.cu."""

_HOPPER_FETCHED, _SHORT_FETCHED = 3, 6
"""FETCHED_STAGES of both kernels: tiles of an e4m3 cache in flight."""

_MAX_CLUSTER_SPLITS = 8
"""MAX_CLUSTER_SPLITS of paged_prefill_short_sm90.cu."""

_SHORT_SHARE = 3
"""Fewest splits per query tile; with fewer, larger tiles are as fast."""

_HOPPER_MOST_CTAS = 1024
"""MAX_SPLITS of paged_prefill_sm90.cu."""


class _Split(NamedTuple):
    num_ctas: int  # blocks per split
    target_splits: int  # splits that fill the device; 0: no sequence may be cut
    num_slots: int
    num_stripes: int  # slots computed at once; a block takes every num_stripes-th
    num_groups: int
    num_members: int  # members of all groups in the plan
    num_rows: int  # rows of the workspace; 0 if nothing is cut
    is_drafted: bool = False  # planned by plan_drafted_rows


def plan_decode_attention(device: KernelLauncher, num_heads: int, batch: AttentionBatch) -> Array:
    """Return int32[num_slots + rows of members, 8]: `KvSplit`s, then `PrefixGroupMember`s (kv_split.cuh)."""
    kv, tables = batch.kv, batch.block_tables
    split = split_decode(device, num_heads, batch)
    tiles = _tiles_of(device, num_heads, batch)
    num_member_rows = math.ceil(split.num_members * _MEMBER_INTS / _SPLIT_INTS)
    plan = device.temporary((split.num_slots + num_member_rows, _SPLIT_INTS), np.int32)
    sizes: tuple[int, ...] = tables.shape[1], batch.window
    if not split.is_drafted:
        sizes = (split.num_stripes if batch.exact else split.num_groups, *sizes)
    sizes = (len(tables), split.num_slots, split.target_splits, *sizes)
    build = {"WARPS": tiles["WARPS"], "MEMBERS": tiles["MEMBERS"], "BLOCK_SIZE": kv.shape[4]}
    build |= {"MIN_SPLIT": _MIN_SPLIT_TOKENS, "MIN_COMMON": _MIN_COMMON_TOKENS, "MAX_SPLITS": _MAX_SPLITS}
    kernel, threads = ("plan_exact_rows", _WARP_SIZE) if batch.exact else ("plan_decode", _PLAN_THREADS)
    if split.is_drafted:
        kernel, threads = "plan_drafted_rows", _WARP_SIZE * math.ceil(len(tables) / _WARP_SIZE)
        build["THREADS"] = threads
    args = (plan, batch.context_lens, tables, *map(np.int32, sizes))
    device.launch(kernel, (1,), args, threads=threads, **build)
    return plan


def decode_attention(device: KernelLauncher, q: Array, batch: AttentionBatch, out: Array) -> None:
    """Launch a decode. Decodes must not overlap, because they share counters."""
    kv, tables = batch.kv, batch.block_tables
    num_sequences, num_heads, head_dim = q.shape
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = kv.shape
    if num_sequences == 0:
        return
    plan = plan_decode_attention(device, num_heads, batch) if batch.plan is None else batch.plan
    split = split_decode(device, num_heads, batch)
    num_partials = split.num_rows * num_heads
    partial_sums = device.temporary((num_partials, head_dim), np.float32)
    partial_stats = device.temporary((num_partials, 2), np.float32)
    tiles = _tiles_of(device, num_heads, batch)
    by_members = batch.exact or split.is_drafted
    if by_members:
        tiles |= {"POLLS": int(batch.exact), "FETCH_EARLY": int(batch.plan is not None)}
        tiles |= _exact_tiles(device, num_heads, batch, tiles)
    sizes = map(np.int32, (num_sequences, num_blocks, num_layers, batch.layer, tables.shape[1]))
    args = (out, q, kv, tables, plan, partial_sums, partial_stats, *sizes, scale_log2(batch.scale), batch.kv_scales)
    device.launch(
        "paged_decode_exact" if by_members else "paged_decode",
        (split.num_ctas, split.num_stripes),
        (*args, np.int32(split.num_slots)) if by_members else args,
        threads=32 * tiles["WARPS"],
        shared_bytes=tiles["SHARED_BYTES"],
        overlaps=True,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_kv_heads,
        **tiles,
        **kv_build(kv),
    )


def prefill_attention(device: KernelLauncher, q: Array, batch: AttentionBatch, out: Array) -> None:
    kv, tables, lens = batch.kv, batch.block_tables, batch.context_lens
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = kv.shape
    group = num_heads // num_kv_heads
    max_rows = batch.max_query_len * group
    if num_tokens == 0 or max_rows == 0:
        return
    if _suits_hopper(device, head_dim, max_rows):
        most_tiles = math.ceil(num_tokens * group / _SHORT_ROWS) * num_kv_heads
        prefill = _prefill_short_on_hopper if most_tiles <= device.num_sms // _SHORT_SHARE else _prefill_on_hopper
        prefill(device, q, batch, out)
        return
    tiles = _prefill_tiles(device.dtype_code, head_dim, max_rows)
    num_tiles = math.ceil(max_rows / _prefill_rows(tiles))
    sizes = map(np.int32, (num_blocks, num_layers, batch.layer, tables.shape[1]))
    device.launch(
        "paged_prefill",
        (num_kv_heads, len(lens), num_tiles),
        (out, q, kv, tables, lens, batch.query_start, *sizes, *_scales(batch)),
        threads=32 * tiles["WARPS"],
        shared_bytes=tiles["SHARED_BYTES"],
        overlaps=False,
        cluster=1,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=group,
        **tiles,
        **kv_build(kv),
    )


def _suits_hopper(device: KernelLauncher, head_dim: int, max_rows: int) -> bool:
    return device.arch == "90a" and device.dtype_code != _FP32 and head_dim in (64, 128) and max_rows > 64


def _prefill_on_hopper(device: KernelLauncher, q: Array, batch: AttentionBatch, out: Array) -> None:
    kv, tables, lens = batch.kv, batch.block_tables, batch.context_lens
    _, num_heads, head_dim = q.shape
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = kv.shape
    group = num_heads // num_kv_heads
    tokens = _HOPPER_ROWS // group  # per query tile
    query_map = device.tensor_maps.get(q, q.shape[::-1], (64, group, tokens))
    cache_map = _cache_map(device, kv, _HOPPER_KEYS)
    is_fp8 = is_e4m3(kv)
    fetched_bytes = _HOPPER_FETCHED * _HOPPER_KEYS * head_dim if is_fp8 else 0
    shared_bytes = 2 * head_dim * (_HOPPER_ROWS + 4 * _HOPPER_KEYS) + fetched_bytes + 256  # queries, two stages of KV
    sizes = (len(lens), num_kv_heads, num_blocks, num_layers, batch.layer, tables.shape[1])
    num_ctas = min(device.num_sms, _HOPPER_MOST_CTAS)
    workspace = (device.temporary((num_ctas, _HOPPER_ROWS, n), np.float32) for n in (head_dim, 2))
    args = (out, query_map, cache_map, tables, lens, batch.query_start, *workspace, *map(np.int32, sizes))
    device.launch(
        "paged_prefill_sm90",
        (num_ctas,),
        (*args, *_scales(batch)),
        threads=_HOPPER_THREADS,
        shared_bytes=shared_bytes,
        overlaps=True,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=group,
        PADDED_ROWS=_HOPPER_ROWS,
        KEYS=_HOPPER_KEYS,
        SHARED_BYTES=shared_bytes,
        **({"FETCHED_STAGES": _HOPPER_FETCHED} if is_fp8 else {}),
        **kv_build(kv),
    )


def _prefill_short_on_hopper(device: KernelLauncher, q: Array, batch: AttentionBatch, out: Array) -> None:
    kv, tables, lens = batch.kv, batch.block_tables, batch.context_lens
    num_tokens, num_heads, _ = q.shape
    num_blocks, num_layers, _, num_kv_heads, _, _ = kv.shape
    group = num_heads // num_kv_heads
    query_map = device.tensor_maps.get(q, q.shape[::-1], (64, group, _SHORT_ROWS // group))
    cache_map = _cache_map(device, kv, _SHORT_KEYS)
    build = _short_build(kv, group)
    cluster, num_clusters = _clusters(device, build, math.ceil(num_tokens * group / _SHORT_ROWS) * num_kv_heads)
    sizes = (len(lens), num_kv_heads, num_blocks, num_layers, batch.layer, tables.shape[1], cluster)
    args = (out, query_map, cache_map, tables, lens, batch.query_start, *map(np.int32, sizes))
    device.launch(
        "paged_prefill_short_sm90",
        (cluster * num_clusters,),
        (*args, *_scales(batch)),
        overlaps=True,
        cluster=cluster,
        **build,
    )


def _clusters(device: KernelLauncher, build: dict[str, int], num_query_tiles: int) -> tuple[int, int]:
    """Return (blocks per cluster, clusters): the largest clusters of which one per query tile runs at once."""
    for size in range(_MAX_CLUSTER_SPLITS, 1, -1):
        num_clusters = device.most_clusters("paged_prefill_short_sm90", size, **build)
        if num_clusters >= num_query_tiles:
            return size, num_clusters
    return 1, device.num_sms


def _short_build(kv: Array, group: int) -> dict[str, int]:
    """Return launch sizes and macros. Shared memory holds queries, stages of KV, barriers, and fetched tiles of e4m3
    with theirs."""
    block_size, head_dim = kv.shape[4:]
    shared_bytes = 1024 + 2 * head_dim * (_SHORT_ROWS + 2 * _SHORT_STAGES * _SHORT_KEYS) + 8 * (3 + 4 * _SHORT_STAGES)
    fetched = {}
    if is_e4m3(kv):
        shared_bytes += _SHORT_FETCHED * (_SHORT_KEYS * head_dim + 16)
        fetched = {"FETCHED_STAGES": _SHORT_FETCHED}
    return {
        "threads": _SHORT_THREADS,
        "shared_bytes": shared_bytes,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "PADDED_ROWS": _SHORT_ROWS,
        "KEYS": _SHORT_KEYS,
        "STAGES": _SHORT_STAGES,
        "SHARED_BYTES": shared_bytes,
        **fetched,
        **kv_build(kv),
    }


def decode_tiles(dtype_code: int, kv: Array, group: int, *, is_alone: bool = False) -> dict[str, int]:
    """Return macros of decode kernels, whose warps stream tiles of 16 keys and values.

    `is_alone`: a single sequence, which shares no prefix.
    """
    head_dim, is_fp8 = kv.shape[5], is_e4m3(kv)
    warps, stages = 4 if head_dim <= 128 else 2, _STAGES_ALONE if is_alone else _STAGES
    rows = min(group, 16)
    most_rows = _MAX_GROUP_ROWS if 64 < head_dim <= 128 and not is_fp8 else _MAX_GROUP_ROWS // 2
    members = 1 if is_alone else min(_MAX_MEMBERS, most_rows // rows)
    ring_bytes = warps * stages * 2 * 16 * _shared_row_bytes(head_dim * (1 if is_fp8 else 2))
    result_bytes = warps * members * rows * (4 * (head_dim + 4) + 8)
    weight_bytes = 8 * rows * _MAX_SPLITS
    tiles = {
        "WARPS": warps,
        "STAGES": stages,
        "MEMBERS": members,
        "MAX_SPLITS": _MAX_SPLITS,
        "SHARED_BYTES": 8 << 10 if dtype_code == _FP32 else max(ring_bytes, result_bytes, weight_bytes),
    }
    return tiles | {"CTAS_PER_SM": _FP8_CTAS_PER_SM} if is_fp8 else tiles


def _tiles_of(device: KernelLauncher, num_heads: int, batch: AttentionBatch) -> dict[str, int]:
    group = num_heads // batch.kv.shape[3]
    tiles = decode_tiles(device.dtype_code, batch.kv, group)
    if not batch.exact and not _reads_drafts_once(device, num_heads, batch):
        return tiles
    return tiles | {"MEMBERS": min(tiles["MEMBERS"], max(2, _MAX_EXACT_GROUP_ROWS // min(group, 16)))}


def _exact_tiles(
    device: KernelLauncher, num_heads: int, batch: AttentionBatch, tiles: dict[str, int]
) -> dict[str, int]:
    """Return the macros of exact rows, for builds that were measured.

    The ring holds a smallest split, which stays in shared memory if rows may form a second group.
    """
    kv, warps = batch.kv, tiles["WARPS"]
    head_dim, num_rows = kv.shape[5], tiles["MEMBERS"] * min(num_heads // kv.shape[3], 16)
    is_measured = device.arch == "90a" and device.dtype_code != _FP32 and head_dim == 128 and not is_e4m3(kv)
    if not batch.exact or not is_measured:
        return {}
    ring_bytes = _KEPT_STAGES * warps * 2 * 16 * _shared_row_bytes(2 * head_dim)
    if len(batch.block_tables) <= tiles["MEMBERS"]:
        result_bytes = warps * num_rows * (4 * (head_dim + 4) + 8)
        weight_bytes = 8 * min(num_heads // kv.shape[3], 16) * _MAX_SPLITS
        return {"STAGES": _KEPT_STAGES, "SHARED_BYTES": max(ring_bytes, result_bytes, weight_bytes)}
    shared_bytes = max(tiles["SHARED_BYTES"], ring_bytes + warps * num_rows * (4 * head_dim + 8))
    return {"KEPT_STAGES": _KEPT_STAGES, "SHARED_BYTES": shared_bytes} if shared_bytes <= _MAX_KEPT_BYTES else {}


def _prefill_tiles(dtype_code: int, head_dim: int, max_rows: int) -> dict[str, int]:
    """Return macros. Shared memory holds queries, two stages of KV, and block ids."""
    keys = 64 if head_dim <= 128 else 32
    tiles = {"WARPS": 4, "ROW_TILES": 2 if head_dim <= 128 and max_rows > 64 else 1, "KEYS": keys}
    num_rows = _prefill_rows(tiles) + 4 * keys
    return tiles | {"SHARED_BYTES": 0 if dtype_code == _FP32 else num_rows * _shared_row_bytes(2 * head_dim) + 128}


def _prefill_rows(tiles: dict[str, int]) -> int:
    return 16 * tiles["WARPS"] * tiles["ROW_TILES"]


def split_decode(device: KernelLauncher, num_heads: int, batch: AttentionBatch) -> _Split:
    """Return the sizes of equal splits that fill the device."""
    kv, window, (num_sequences, max_blocks) = batch.kv, batch.window, batch.block_tables.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[4]
    group, num_ctas = num_heads // num_kv_heads, _num_ctas(device, num_heads, kv)
    is_cut = num_sequences * num_ctas <= _MAX_PAIRS
    target_splits = max(1, _DECODE_CTAS_PER_SM * device.num_sms // num_ctas) if is_cut else 0
    num_tokens = max_blocks * block_size
    most_splits = math.ceil(min(num_tokens, window + _DECODE_TILE_TOKENS) / _MIN_SPLIT_TOKENS)
    if batch.exact:
        most_splits = max(1, min(target_splits, most_splits))
        num_slots = num_sequences * most_splits
        num_rows = num_slots if most_splits > 1 else 0
        num_stripes = min(num_slots, _num_stripes(device, num_ctas, is_e4m3(kv)))
        return _Split(num_ctas, target_splits, num_slots, num_stripes, 0, num_sequences, num_rows)
    if _reads_drafts_once(device, num_heads, batch):
        members = _tiles_of(device, num_heads, batch)["MEMBERS"]
        num_slots = num_sequences + 2 * target_splits
        num_rows = num_sequences + 2 * target_splits * members
        return _Split(num_ctas, target_splits, num_slots, num_slots, 0, num_sequences, num_rows, is_drafted=True)
    most_slots = target_splits if num_sequences == 1 else num_sequences + 2 * target_splits
    num_slots = max(num_sequences, min(most_slots, num_sequences * most_splits))
    if num_slots == num_sequences:
        return _Split(num_ctas, 0, num_slots, num_slots, 0, 0, 0)
    members = decode_tiles(device.dtype_code, kv, group)["MEMBERS"]
    may_share = members > 1 and target_splits > 1 and _MIN_COMMON_TOKENS < num_tokens <= window
    if not may_share or not 1 < num_sequences <= _PLAN_THREADS:
        return _Split(num_ctas, target_splits, num_slots, num_slots, 0, 0, num_slots)
    num_groups = num_sequences // 8 + min(num_sequences // 2, 8)
    num_rows = num_slots + min(members * (num_groups + target_splits), num_sequences * target_splits)
    num_slots += num_groups
    return _Split(num_ctas, target_splits, num_slots, num_slots, num_groups, num_groups * members, num_rows)


def _num_ctas(device: KernelLauncher, num_heads: int, kv: Array) -> int:
    """Return the number of blocks per split: each has up to 16 query heads of a KV head, or one in float32."""
    num_kv_heads = kv.shape[3]
    group = num_heads // num_kv_heads
    rows = 1 if device.dtype_code == _FP32 else min(group, 16)
    return int(num_kv_heads * math.ceil(group / rows))


def _reads_drafts_once(device: KernelLauncher, num_heads: int, batch: AttentionBatch) -> bool:
    """Return whether plan_drafted_rows plans the batch."""
    count = len(batch.block_tables)
    is_cut = count * _num_ctas(device, num_heads, batch.kv) <= _MAX_PAIRS
    return batch.drafted and not batch.exact and 1 < count <= _PLAN_THREADS and is_cut


def _num_stripes(device: KernelLauncher, num_ctas: int, is_fp8: bool) -> int:
    """Return how many slots of `num_ctas` blocks each run at once."""
    ctas_per_sm = _FP8_CTAS_PER_SM if is_fp8 else _DECODE_CTAS_PER_SM
    return max(1, ctas_per_sm * device.num_sms // num_ctas)


def _shared_row_bytes(row_bytes: int) -> int:
    """Return the row stride of `TileOf` (paged_kv.cuh)."""
    chunks = row_bytes // 16
    is_swizzled = chunks >= 8 and chunks & (chunks - 1) == 0
    return 16 * (chunks if is_swizzled else chunks | 1)


def is_e4m3(kv: Array) -> bool:
    return bool(kv.dtype.itemsize == 1)


def kv_build(kv: Array) -> dict[str, int]:
    return {"QUIRE_KV_FP8": 1} if is_e4m3(kv) else {}


def _cache_map(device: KernelLauncher, kv: Array, keys: int) -> np.ndarray:
    """Return a tensor map of the cache as rows of head_dim; a box holds rows of one block."""
    *_, block_size, head_dim = kv.shape
    width, item_bytes = (head_dim, 1) if is_e4m3(kv) else (64, 2)
    sizes, box = (head_dim, math.prod(kv.shape[:-1])), (width, min(keys, block_size))
    return device.tensor_maps.get(kv, sizes, box, item_bytes)


def _scales(batch: AttentionBatch) -> tuple[np.float32, np.int32, Array | None]:
    """Return the last arguments of the prefill kernels."""
    return scale_log2(batch.scale), np.int32(batch.window), batch.kv_scales


def scale_log2(scale: float) -> np.float32:
    """Return the scale for exp2."""
    return np.float32(scale * math.log2(math.e))
