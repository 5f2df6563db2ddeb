"""Kernels that multiply by experts, by device, format and rows. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.int4 import tile
from model.ops.interface import ExpertGroups, Fp8Rows
from model.ops.weight import Weight, WeightFormat
from tests.support.expert_checks import random_stack
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

reason = "needs the packages of the cuda extra"
products = pytest.importorskip("model.ops.gpu.experts.products", reason=reason, exc_type=ImportError)

EXPERTS, USED, N, K = 16, 2, 256, 512


def groups_of(num_rows: int) -> ExpertGroups:
    int32 = np.int32
    pairs = num_rows * USED
    return ExpertGroups(
        FakeStack((pairs,), int32), FakeStack((num_rows, USED), int32), FakeStack((EXPERTS + 1,), int32)
    )


def stack_of(kind: WeightFormat) -> Weight:
    if kind is WeightFormat.INT4_TILED:
        data, scale = (EXPERTS, K // 128, N // 16, 1024), (EXPERTS, K // 64, N // 16, 16)
        return Weight(FakeStack(data, np.uint8), kind, FakeStack(scale, BFLOAT16), group_size=64)
    host = random_stack(np.random.default_rng(0), (EXPERTS, N, K), kind, BFLOAT16)
    scale = None if host.scale is None else FakeStack(host.scale.shape, np.float32)
    return Weight(FakeStack(host.data.shape, host.data.dtype), kind, scale)


def launched_for(num_rows: int, kind: WeightFormat, *, in_e4m3: bool = False, is_sorted: bool = False, **device):
    ops = StackLauncher(**device)
    rows = num_rows * USED if is_sorted else num_rows
    x = FakeStack((rows, K), np.uint8 if in_e4m3 else ops.dtype)
    operand = Fp8Rows(x, FakeStack((rows,), np.float32)) if in_e4m3 else x
    products.experts_linear(ops, operand, stack_of(kind), groups_of(num_rows), is_sorted)
    return ops.launched


@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_few_rows_take_the_gemv_kernels(arch: str):
    assert launched_for(16, WeightFormat.DENSE, arch=arch) == ["experts_gemv"]
    for kind in (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8):
        assert launched_for(16, kind, arch=arch) == ["experts_gemv_w8"]
    assert launched_for(16, WeightFormat.FP8, in_e4m3=True, arch=arch) == ["experts_gemv_w8"]
    assert launched_for(16, WeightFormat.INT4_TILED, arch=arch) == ["experts_gemv_w4a16"]


def test_quantised_experts_take_hopper_s_product_from_fewer_pairs_on():
    assert launched_for(32, WeightFormat.DENSE) == ["experts_gemv"]
    assert launched_for(32, WeightFormat.FP8, in_e4m3=True) == ["gather_rows", "gather_rows", "experts_sm90"]
    assert launched_for(32, WeightFormat.INT4_TILED) == ["gather_rows", "experts_w4a16_sm90"]
    assert launched_for(32, WeightFormat.INT8) == ["experts_gemv_w8"]


def test_many_rows_are_gathered_for_hopper_s_product():
    assert launched_for(512, WeightFormat.DENSE) == ["gather_rows", "experts_sm90"]
    assert launched_for(512, WeightFormat.DENSE, is_sorted=True) == ["experts_sm90"]
    assert launched_for(512, WeightFormat.FP8, in_e4m3=True) == ["gather_rows", "gather_rows", "experts_sm90"]
    assert launched_for(256, WeightFormat.FP8) == ["experts_gemv_w8"]
    for kind in (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8):
        assert launched_for(512, kind) == ["gather_rows", "dequantise_rows", "experts_sm90"]
    assert launched_for(512, WeightFormat.DENSE, arch="80") == ["experts_gemv"]
    assert launched_for(512, WeightFormat.INT4_TILED) == ["gather_rows", "experts_w4a16_sm90"]
    assert launched_for(512, WeightFormat.INT4_TILED, arch="120") == ["experts_gemv_w4a16"]


def test_experts_of_8_bits_are_widened_range_after_range(monkeypatch):
    """A grid for all pairs each, and the offsets of the range's experts."""
    monkeypatch.setattr(products, "WIDENED_BYTES", 7 * N * K * 2)
    seen = []
    monkeypatch.setattr(StackLauncher, "launch", lambda self, name, grid, args, **_: seen.append((name, grid[0], args)))
    launched_for(512, WeightFormat.FP8, is_sorted=True)
    assert [name for name, *_ in seen] == ["dequantise_rows", "experts_sm90"] * 3
    assert [grid for name, grid, _ in seen if name == "dequantise_rows"] == [7 * N, 7 * N, 2 * N]
    assert [args[4].shape for name, _, args in seen if name == "experts_sm90"] == [(8,), (8,), (3,)]
    assert [args[6] for name, _, args in seen if name == "experts_sm90"] == [7, 7, 2]


def test_what_no_kernel_takes_is_refused():
    weight = Weight(FakeStack((EXPERTS, N, K // 2), np.uint8), WeightFormat.INT4)
    with pytest.raises(ValueError, match=r"int4 are not supported \(dense, fp8, fp8-block, int8, int4-tiled\)"):
        products.experts_linear(StackLauncher(), FakeStack((4, K), BFLOAT16), weight, groups_of(4), False)
    with pytest.raises(ValueError, match="in float32 is not supported"):
        launched_for(4, WeightFormat.DENSE, dtype=np.float32)
    with pytest.raises(ValueError, match="x in e4m3 and weights in int8 do not go together"):
        launched_for(4, WeightFormat.INT8, in_e4m3=True)


def test_a_stack_of_int4_is_dequantised_expert_by_expert():
    rng = np.random.default_rng(0)
    scale = rng.random((3, 8, 2), np.float32)
    weight = Weight(rng.integers(0, 256, (3, 8, 32), np.uint8), WeightFormat.INT4, scale, group_size=32)
    values = products.dequantised_stack(weight, np.dtype(np.float32))
    codes = np.stack([weight.data & 15, weight.data >> 4], axis=3).reshape(3, 8, 2, 32).astype(np.float32) - 8
    np.testing.assert_allclose(values, (codes * scale[..., None]).reshape(3, 8, 64), rtol=1e-6)


def test_a_stack_of_int4_is_packed_in_its_memory():
    rng = np.random.default_rng(0)
    scale = rng.random((3, 32, 2), np.float32).astype(np.float16)
    weight = Weight(rng.integers(0, 256, (3, 32, 128), np.uint8), WeightFormat.INT4, scale, group_size=128)
    expected = [tile(weight.expert(index)) for index in range(3)]

    def pack(one: Weight) -> Weight:
        tiled = tile(one)
        for to, values in ((one.data, tiled.data), (one.scale, tiled.scale)):
            to.reshape(-1)[:] = values.reshape(-1)
        return tiled

    packed = products.pack_stack(weight, pack)
    assert np.shares_memory(packed.data, weight.data)
    assert packed.shape == (32, 256)
    for index, one in enumerate(expected):
        np.testing.assert_array_equal(packed.expert(index).data, one.data)
        np.testing.assert_array_equal(packed.expert(index).scale, one.scale)
