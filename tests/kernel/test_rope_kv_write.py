from copy import copy
from dataclasses import dataclass

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.fp8 import narrow
from model.ops.interface import HeadRotation
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of
from tests.support.paged_cache import in_e4m3

pytestmark = pytest.mark.gpu


@dataclass
class Case:
    """Everything the op takes, on the host."""

    rng: np.random.Generator
    dtype: str
    num_tokens: int
    head_dim: int
    block_size: int
    heads: tuple[int, int]  # query, key/value
    layer: int = 1
    max_len: int = 60
    num_blocks: int = 20
    in_fp8: bool = False  # the cache

    def __post_init__(self):
        num_heads, num_kv_heads = self.heads
        shape = (self.num_tokens, (num_heads + 2 * num_kv_heads) * self.head_dim)
        angles = self.rng.uniform(0, 6, (self.max_len, self.head_dim // 2))
        num_slots = self.num_blocks * self.block_size
        self.qkv = normal(self.rng, shape, self.dtype)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.positions = self.rng.integers(0, self.max_len, self.num_tokens).astype(np.int32)
        self.slots = self.rng.permutation(num_slots)[: self.num_tokens].astype(np.int64)
        cache = (self.num_blocks, 3, 2, num_kv_heads, self.block_size, self.head_dim)
        self.kv = normal(self.rng, cache, self.dtype)
        self.kv_scales = None
        if self.in_fp8:
            self.kv, self.kv_scales = in_e4m3(self.rng, self.kv)
        self.q_norm, self.k_norm = (normal(self.rng, (self.head_dim,), self.dtype) for _ in range(2))

    def run(self, ops, with_norms: bool) -> tuple[np.ndarray, np.ndarray]:
        """-> q, kv afterwards"""
        kv = ops.upload(self.kv)
        norms = [ops.upload(self.q_norm), ops.upload(self.k_norm)] if with_norms else [None, None]
        with ops.scratch():
            rotation = HeadRotation(ops.upload(self.cos), ops.upload(self.sin), *norms, 1e-6)
            rows = [ops.upload(each) for each in (self.positions, self.slots)]
            scales = None if self.kv_scales is None else ops.upload(self.kv_scales)
            q = ops.download(ops.rope_kv_write(ops.upload(self.qkv), rotation, *rows, kv, self.layer, scales))
        return q, ops.download(kv)


def check(ops, case: Case, with_norms: bool) -> None:
    q, kv = case.run(ops, with_norms)
    expected_q, expected_kv = case.run(NumpyOps(NUMPY_DTYPES[case.dtype]), with_norms)
    assert_close(q, expected_q, case.dtype)
    untouched = (expected_kv == case.kv).all(axis=-1)
    assert_close(kv[~untouched], expected_kv[~untouched], case.dtype)
    np.testing.assert_array_equal(kv[untouched].astype(np.float32), case.kv[untouched].astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("with_norms", [False, True])
def test_heads_of_all_sizes(open_ops, rng, dtype, head_dim, with_norms):
    check(open_ops(dtype), Case(rng, dtype, 21, head_dim, 16, heads=(6, 2)), with_norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("with_norms", [False, True])
def test_a_cache_in_e4m3_holds_what_rounding_the_stored_values_gives(open_ops, rng, dtype, head_dim, with_norms):
    """Equal bytes where the value before rounding is the same, which rotation and norm make it but for its last bit."""
    case = Case(rng, dtype, 21, head_dim, 16, heads=(6, 2), in_fp8=True)
    plain = copy(case)
    plain.kv, plain.kv_scales = np.zeros(case.kv.shape, NUMPY_DTYPES[dtype]), None
    q, kv = case.run(open_ops(dtype, np.dtype(np.uint8)), with_norms)
    expected_q, stored = plain.run(open_ops(dtype), with_norms)
    np.testing.assert_array_equal(q, expected_q)
    written = np.zeros(kv.shape[0] * kv.shape[4], bool)
    written[case.slots] = True
    written = np.broadcast_to(written.reshape(kv.shape[0], 1, 1, 1, -1), kv.shape[:-1]).copy()
    written[:, np.arange(kv.shape[1]) != case.layer] = False
    scaled = stored.astype(np.float32) / case.kv_scales[None, :, :, :, None, None]
    np.testing.assert_array_equal(kv[written], narrow(scaled)[written])
    np.testing.assert_array_equal(kv[~written], case.kv[~written])


def test_e4m3_saturates_and_keeps_nan(open_ops, rng):
    case = Case(rng, "bfloat16", 5, 64, 16, heads=(2, 1), in_fp8=True)
    case.qkv[:, -64:] = np.array([np.inf, -1e30, np.nan, 1e-30, -0.0], np.float32)[:, None]
    _, kv = case.run(open_ops("bfloat16", np.dtype(np.uint8)), with_norms=False)
    rows = kv[case.slots // 16, case.layer, 1, 0, case.slots % 16]
    np.testing.assert_array_equal(rows, np.array([[0x7E], [0xFE], [0x7F], [0], [0x80]], np.uint8).repeat(64, axis=1))


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (7, 1)])
def test_blocks_and_head_counts(open_ops, rng, block_size, heads):
    check(open_ops("bfloat16"), Case(rng, "bfloat16", 64, 128, block_size, heads), with_norms=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_and_positions_outside_change_nothing(open_ops, rng, dtype):
    case = Case(rng, dtype, 12, 64, 16, heads=(4, 2))
    case.slots[:4] = [-1, 20 * 16, np.iinfo(np.int64).max, np.iinfo(np.int64).min]
    case.positions[4:8] = [-1, case.max_len, np.iinfo(np.int32).max, np.iinfo(np.int32).min]
    check(open_ops(dtype), case, with_norms=True)


def test_no_tokens(open_ops, rng):
    q, _ = Case(rng, "bfloat16", 0, 64, 16, heads=(4, 2)).run(open_ops("bfloat16"), with_norms=True)
    assert q.shape == (0, 4, 64)


def test_speed(open_ops, rng):
    ops, rows, head_dim, heads = open_ops("bfloat16"), 8192, 128, (32, 8)
    case = Case(rng, "bfloat16", 1, head_dim, 16, heads, max_len=8192, num_blocks=1)
    kv = ops.empty((1024, 2, 2, heads[1], 16, head_dim), ops.dtype)
    rotation = HeadRotation(ops.upload(case.cos), ops.upload(case.sin))
    positions, slots = ops.upload(np.arange(rows, dtype=np.int32)), ops.upload(rng.permutation(rows).astype(np.int64))
    width = (heads[0] + 2 * heads[1]) * head_dim
    inputs = [ops.empty((rows, width), ops.dtype) for _ in range(3)]
    launches = [lambda qkv=qkv: ops.rope_kv_write(qkv, rotation, positions, slots, kv, 1) for qkv in inputs]
    report_bandwidth("rope_kv_write [8192, 48 x 128] bf16", 2 * rows * width * 2, seconds_of(ops, launches))
