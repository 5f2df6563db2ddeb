"""Products that multiply by adapters: their builds and launches. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.gpu.adapters import product
from model.ops.interface import Fp8Rows
from model.ops.weight import Weight
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

H200 = 132, 227 << 10
SLOTS = 32


class Launches(StackLauncher):
    def zeros(self, shape, dtype):
        return [FakeStack(shape[1:], dtype) for _ in range(shape[0])]

    def launch(self, name, grid, args, **how):
        self.launched.append((name, grid, [int(arg) for arg in args if isinstance(arg, np.int32)], how))


def launched(
    num_rows: int,
    ends: tuple[int, ...],
    k: int,
    *,
    rank: int = 16,
    tile_rows: int = 16,
    fp8: tuple[bool, bool] = (False, False),
    **device,
) -> list:
    """`fp8`: x, weight."""
    ops = Launches(**device)
    matrix = AdapterMatrix(
        FakeStack((SLOTS, len(ends), rank, k), BFLOAT16),
        FakeStack((SLOTS, ends[-1], rank), BFLOAT16),
        FakeStack((SLOTS,), np.int32),
        ends,
    )
    rows = AdapterRows(FakeStack((num_rows,), np.int32), FakeStack((36, 3), np.int32), tile_rows)
    x, weight = FakeStack((num_rows, k), BFLOAT16), FakeStack((ends[-1], k), np.uint8 if fp8[1] else BFLOAT16)
    if fp8[0]:
        x = Fp8Rows(FakeStack(x.shape, np.uint8), FakeStack((num_rows,), np.float32))
    scale = FakeStack(ends[-1:], np.float32)
    out = product.AdaptedProduct(ops)(x, Weight.fp8(weight, scale) if fp8[1] else Weight(weight), None, matrix, rows)
    assert (out is None) == (not ops.launched)
    return ops.launched


def test_a_decode_of_many_adapters():
    """Two blocks split K of each of 64 tiles; 3 pieces of A in a ring, 36 tiles of rows, units of 48 outputs."""
    ((name, grid, sizes, how),) = launched(64, (4096, 5120, 6144), 4096)
    assert (name, grid) == ("adapted_product_sm90", (128,))
    assert sizes == [64, 6144, 4096, 1, 3, 64, 36, SLOTS, 3, 16, 4096, 5120, 48]
    assert how["threads"] == 2 * 128 + 32 + 4 * 32
    assert how["overlaps"]


def test_e4m3_rows_and_weights_have_a_build_of_their_own():
    ((_, _, sizes, how),) = launched(64, (4096, 5120, 6144), 4096, fp8=(True, True))
    assert sizes == [64, 6144, 4096, 1, 3, 64, 36, SLOTS, 3, 16, 4096, 5120, 48]
    assert how["WEIGHT_FP8"] == 1
    build, plain = (product.product_build(64, 6144, 3, 16, *H200, is_fp8=is_fp8) for is_fp8 in (True, False))
    assert (build.rows, build.cols, build.split) == (plain.rows, plain.cols, plain.split)


@pytest.mark.parametrize(
    ("num_parts", "rank", "outputs"), [(1, 16, 16), (2, 16, 32), (3, 16, 48), (2, 32, 32), (3, 32, 48), (3, 64, 48)]
)
def test_units_of_at_most_48_outputs(num_parts, rank, outputs):
    ends = tuple(range(1024, 1024 * (num_parts + 1), 1024))
    ((_, _, sizes, _),) = launched(64, ends, 4096, rank=rank)
    assert sizes[-1] == outputs


@pytest.mark.parametrize(
    "other",
    [
        {"num_rows": 7},
        {"num_rows": 97},
        {"k": 4100},
        {"k": 4104, "fp8": (True, True)},
        {"fp8": (True, False)},
        {"fp8": (False, True)},
        {"rank": 8},
        {"rank": 128},
        {"tile_rows": 32},
        {"num_rows": 31},  # of 36 tiles
        {"arch": "80"},
        {"dtype": np.float32},
    ],
    ids=str,
)
def test_other_products_have_no_kernel(other):
    assert launched(**{"num_rows": 64, "ends": (4096,), "k": 4096, **other}) == []


@pytest.mark.parametrize("num_rows", [8, 32, 33, 64, 96])
@pytest.mark.parametrize("weights", [(512, 3), (512, 1), (4096, 1), (6144, 3), (28672, 2)])
@pytest.mark.parametrize("max_rank", [16, 32, 64])
def test_a_build_fits_and_keeps_its_sums_order(num_rows, weights, max_rank):
    """Blocks that split K do not depend on the number of rows."""
    build = product.product_build(num_rows, *weights, max_rank, *H200)
    assert build.shared_bytes <= H200[1]
    assert build.rank_steps == max_rank // 16
    assert build.num_pieces >= 2
    assert build.split == product.product_build(96, *weights, 16, *H200).split
