from dataclasses import replace

import numpy as np
import pytest

from model.ops.adapter_interface import AdapterMatrix
from model.ops.cpu.ops import NumpyOps
from model.ops.gpu.adapters.pairs import MAX_SINGLE_PAIRS, MAX_SPLIT_PAIRS
from model.ops.interface import ExpertGroups
from tests.support.expert_checks import REFERENCE, routed_ids, upload_groups
from tests.support.kernel_checks import (
    DTYPES,
    NUMPY_DTYPES,
    assert_close,
    normal,
    repeated,
    report_bandwidth,
    seconds_of,
)

pytestmark = pytest.mark.gpu

NUM_EXPERTS, NUM_USED, MAX_RANK = 11, 3, 32
RANKS = (8, 0, 3, 32)
PARTS = {"down": (264,), "gate_up": (640, 1280)}


def matrix_of(rng, dtype: str, ends, num_inputs: int, num_experts: int = NUM_EXPERTS) -> AdapterMatrix:
    """A's rows beyond a rank are NaN."""
    count = len(RANKS) * num_experts
    ranks = np.repeat(np.array(RANKS, np.int32), num_experts)
    a = normal(rng, (count, len(ends), MAX_RANK, num_inputs), dtype, num_inputs**-0.5)
    b = normal(rng, (count, ends[-1], MAX_RANK), dtype)
    for adapter, rank in enumerate(ranks):
        a[adapter, :, rank:] = np.nan
        b[adapter, :, rank:] = 0
    return AdapterMatrix(a, b, ranks, ends)


def on_device(ops, matrix: AdapterMatrix) -> AdapterMatrix:
    return replace(matrix, **{name: ops.upload(getattr(matrix, name)) for name in ("a", "b", "ranks")})


def added(ops, x, matrix, slots, out, groups: ExpertGroups | None, *, is_sorted: bool) -> np.ndarray:
    on_gpu = ops.upload(out)
    with ops.scratch():
        own = None if groups is None else upload_groups(ops, groups)
        ops.lora_add(ops.upload(x), on_device(ops, matrix), ops.upload(slots), on_gpu, own, is_sorted=is_sorted)
    return ops.download(on_gpu)


def expected(x, matrix, slots, out, groups, dtype: str, *, is_sorted: bool) -> np.ndarray:
    wanted = out.copy()
    NumpyOps(NUMPY_DTYPES[dtype]).lora_add(x, matrix, slots, wanted, groups, is_sorted=is_sorted)
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, MAX_SINGLE_PAIRS // NUM_USED, MAX_SINGLE_PAIRS // NUM_USED + 1])
def test_pairs_of_mixed_adapters(open_ops, rng, dtype, parts, is_sorted, num_rows):
    """Padding and rows without an adapter are unchanged; some experts have most rows."""
    num_pairs, num_inputs, ends = NUM_USED * num_rows, 264, PARTS[parts]
    ids = routed_ids(rng, num_rows, NUM_EXPERTS, NUM_USED)
    ids[num_rows // 2 : num_rows // 2 + num_rows // 8] = -1
    groups = REFERENCE.group_by_expert(ids, NUM_EXPERTS)
    slots = np.sort(rng.integers(-1, len(RANKS), num_rows)).astype(np.int32)
    matrix = matrix_of(rng, dtype, ends, num_inputs)
    x = normal(rng, (num_pairs if is_sorted else num_rows, num_inputs), dtype)
    out = normal(rng, (num_pairs, ends[-1]), dtype)
    undefined = replace(groups, rows=groups.rows.copy())
    undefined.rows[groups.offsets[-1] :] = 1 << 30
    found = added(open_ops(dtype), x, matrix, slots, out, undefined, is_sorted=is_sorted)
    assert_close(found, expected(x, matrix, slots, out, groups, dtype, is_sorted=is_sorted), dtype)
    np.testing.assert_array_equal(found[groups.offsets[-1] :], out[groups.offsets[-1] :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 300, 1100])
def test_rows_of_a_router(open_ops, rng, dtype, num_rows):
    matrix, slots = matrix_of(rng, dtype, (100,), 256, 1), rng.integers(-1, len(RANKS), num_rows).astype(np.int32)
    x, out = normal(rng, (num_rows, 256), dtype), rng.standard_normal((num_rows, 100), np.float32)
    found = added(open_ops(dtype), x, matrix, slots, out, None, is_sorted=False)
    assert_close(found, expected(x, matrix, slots, out, None, dtype, is_sorted=False), "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch(open_ops, rng, dtype):
    """In blocks of one pair and of several, in whole and in shared columns."""
    ops, ends, num_rows = open_ops(dtype), (512, 1024), 700
    matrix = matrix_of(rng, dtype, ends, 2048)
    ids = routed_ids(rng, num_rows, NUM_EXPERTS, NUM_USED)
    slots = np.full(num_rows, 3, np.int32)
    x, by_row = normal(rng, (num_rows, 2048), dtype), normal(rng, (num_rows, NUM_USED, ends[-1]), dtype)

    def rows_of(own: slice) -> np.ndarray:
        groups = REFERENCE.group_by_expert(ids[own], NUM_EXPERTS)
        out = np.empty((groups.places.size, ends[-1]), x.dtype)
        out[groups.places] = by_row[own]
        return added(ops, x[own], matrix, slots[own], out, groups, is_sorted=False)[groups.places]

    whole = rows_of(slice(num_rows))
    for first, count in ((0, 1), (5, MAX_SPLIT_PAIRS // NUM_USED), (100, 200), (20, 500)):
        np.testing.assert_array_equal(rows_of(slice(first, first + count)), whole[first : first + count])


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 2048])
@pytest.mark.parametrize("shape", [((768, 1536), 2048, False), ((2048,), 768, True)], ids=["gate_up", "down"])
def test_speed(open_ops, rng, num_rows, shape):
    """Rank 16 on every expert of Qwen3-30B-A3B, 4 adapters in turn, several layers'; bytes of the adapters in use."""
    (ends, num_inputs, is_sorted), num_slots, rank = shape, 4, 16
    ops, num_experts, num_used = open_ops("bfloat16"), 128, 8
    logits = rng.standard_normal((num_rows, num_experts)).astype(np.float32)
    ids = REFERENCE.route_experts(logits, num_used, False)[0]
    groups, slots = REFERENCE.group_by_expert(ids, num_experts), np.arange(num_rows, dtype=np.int32) * 4 // num_rows
    count = num_slots * num_experts
    sizes = (len(ends), rank, num_inputs), (ends[-1], rank)
    a, b = (ops.upload(repeated(normal(rng, size, "bfloat16", 0.01), count, *size)) for size in sizes)
    matrices = [AdapterMatrix(a, b, ops.upload(np.full(count, rank, np.int32)), ends)]
    matrices += [replace(matrices[0], a=a.copy(), b=b.copy()) for _ in range(2)]
    own, on_gpu = upload_groups(ops, groups), ops.upload(slots)
    x = ops.upload(normal(rng, (num_rows * (num_used if is_sorted else 1), num_inputs), "bfloat16"))
    out = ops.upload(np.zeros((num_rows * num_used, ends[-1]), NUMPY_DTYPES["bfloat16"]))
    used = len(np.unique(np.repeat(slots, num_used) * num_experts + ids.reshape(-1)))
    num_bytes = used * rank * (len(ends) * num_inputs + ends[-1]) * 2
    launches = [lambda each=each: ops.lora_add(x, each, on_gpu, out, own, is_sorted=is_sorted) for each in matrices]
    report_bandwidth(f"experts_lora {num_rows} rows of {ends}", num_bytes, seconds_of(ops, launches))
