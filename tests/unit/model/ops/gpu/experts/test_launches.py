"""Which kernels are launched for experts, by device, format and rows. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from model.ops.interface import ExpertGroups, Fp8Rows
from model.ops.weight import Weight, WeightFormat
from tests.support.expert_checks import random_stack
from tests.support.fake_launcher import BFLOAT16, FakeArray, FakeLauncher

reason = "needs the packages of the cuda extra"
launches = pytest.importorskip("model.ops.gpu.experts.launches", reason=reason, exc_type=ImportError)

EXPERTS, USED, N, K = 16, 2, 256, 512


class Stacked(FakeArray):
    """As CuPy's arrays, also where they are viewed and gathered."""

    flags = SimpleNamespace(c_contiguous=True)

    def view(self, dtype):
        width = self.shape[-1] * self.dtype.itemsize // np.dtype(dtype).itemsize
        return Stacked((*self.shape[:-1], width), dtype)

    def reshape(self, *shape):
        return Stacked(shape if -1 not in shape else (self.shape[0], *shape[1:]), self.dtype)

    @property
    def size(self):
        return int(np.prod(self.shape))


class Launcher(FakeLauncher):
    dtype_code = 2

    def temporary(self, shape, dtype):
        return Stacked(shape, dtype)


def groups_of(num_rows: int) -> ExpertGroups:
    int32 = np.int32
    pairs = num_rows * USED
    return ExpertGroups(Stacked((pairs,), int32), Stacked((num_rows, USED), int32), Stacked((EXPERTS + 1,), int32))


def stack_of(kind: WeightFormat) -> Weight:
    host = random_stack(np.random.default_rng(0), (EXPERTS, N, K), kind, BFLOAT16)
    scale = None if host.scale is None else Stacked(host.scale.shape, np.float32)
    return Weight(Stacked(host.data.shape, host.data.dtype), kind, scale)


def launched_for(num_rows: int, kind: WeightFormat, *, in_e4m3: bool = False, is_sorted: bool = False, **device):
    ops = Launcher(**device)
    rows = num_rows * USED if is_sorted else num_rows
    x = Stacked((rows, K), np.uint8 if in_e4m3 else ops.dtype)
    operand = Fp8Rows(x, Stacked((rows,), np.float32)) if in_e4m3 else x
    launches.experts_linear(ops, operand, stack_of(kind), groups_of(num_rows), is_sorted)
    return ops.launched


@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_few_rows_take_the_gemv_kernels(arch: str):
    assert launched_for(16, WeightFormat.DENSE, arch=arch) == ["experts_gemv"]
    for kind in (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8):
        assert launched_for(16, kind, arch=arch) == ["experts_gemv_w8"]
    assert launched_for(16, WeightFormat.FP8, in_e4m3=True, arch=arch) == ["experts_gemv_w8"]


def test_many_rows_are_gathered_for_hopper_s_product():
    assert launched_for(512, WeightFormat.DENSE) == ["gather_rows", "experts_sm90"]
    assert launched_for(512, WeightFormat.DENSE, is_sorted=True) == ["experts_sm90"]
    assert launched_for(512, WeightFormat.FP8, in_e4m3=True) == ["gather_rows", "gather_rows", "experts_sm90"]
    assert launched_for(512, WeightFormat.FP8) == ["experts_gemv_w8"]
    assert launched_for(512, WeightFormat.DENSE, arch="80") == ["experts_gemv"]


def test_what_no_kernel_takes_is_refused():
    weight = Weight(Stacked((EXPERTS, N, K // 2), np.uint8), WeightFormat.INT4)
    with pytest.raises(ValueError, match=r"int4 are not supported \(dense, fp8, fp8-block, int8\)"):
        launches.experts_linear(Launcher(), Stacked((4, K), BFLOAT16), weight, groups_of(4), False)
    with pytest.raises(ValueError, match="in float32 is not supported"):
        launched_for(4, WeightFormat.DENSE, dtype=np.float32)
    with pytest.raises(ValueError, match="x in e4m3 and weights in int8 do not go together"):
        launched_for(4, WeightFormat.INT8, in_e4m3=True)
    with pytest.raises(ValueError, match="9 of 8 experts"):
        launches.route_experts(Launcher(), Stacked((4, 8), np.float32), (9, True), None, 0)
    with pytest.raises(ValueError, match="2000 experts"):
        launches.group_by_expert(Launcher(), Stacked((4, 8), np.int32), 2000)


def test_routing_and_summing_are_one_launch_each():
    ops = Launcher()
    logits, slots = Stacked((4, EXPERTS), np.float32), Stacked((4,), np.int64)
    ids, weights = launches.route_experts(ops, logits, (USED, True), slots, 64)
    groups = launches.group_by_expert(ops, ids, EXPERTS)
    out = launches.combine_experts(ops, Stacked((4 * USED, N), BFLOAT16), groups, weights)
    assert ops.launched == ["route_experts", "group_by_expert", "combine_experts"]
    assert (groups.rows.shape, groups.places.shape, groups.offsets.shape) == ((8,), (4, USED), (EXPERTS + 1,))
    assert out.shape == (4, N)


def test_a_stack_of_int4_is_dequantised_expert_by_expert():
    rng = np.random.default_rng(0)
    scale = rng.random((3, 8, 2), np.float32)
    weight = Weight(rng.integers(0, 256, (3, 8, 32), np.uint8), WeightFormat.INT4, scale, group_size=32)
    values = launches.dequantised_stack(weight, np.dtype(np.float32))
    codes = np.stack([weight.data & 15, weight.data >> 4], axis=3).reshape(3, 8, 2, 32).astype(np.float32) - 8
    np.testing.assert_allclose(values, (codes * scale[..., None]).reshape(3, 8, 64), rtol=1e-6)
