"""Launches of adapters' products by shapes alone. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.adapter_slots import adapter_rows, group_rows
from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.cpu.ops import NumpyOps
from model.ops.gpu.adapters import launches as lora
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher
from tests.support.lora_cases import lora_case

SLOTS, RANK = 32, 16


class Launches(StackLauncher):
    def launch(self, name, grid, args, **how):
        self.launched.append((name, grid, [int(arg) for arg in args if isinstance(arg, np.int32)], how))


def matrix_of(ends: tuple[int, ...], num_inputs: int, rank: int = RANK) -> AdapterMatrix:
    a = FakeStack((SLOTS, len(ends), rank, num_inputs), BFLOAT16)
    return AdapterMatrix(a, FakeStack((SLOTS, ends[-1], rank), BFLOAT16), FakeStack((SLOTS,), np.int32), ends)


def rows_of(num_rows: int, num_tiles: int, tile_rows: int) -> AdapterRows:
    return AdapterRows(FakeStack((num_rows,), np.int32), FakeStack((num_tiles, 3), np.int32), tile_rows)


def launched(matrix: AdapterMatrix, adapters: AdapterRows, num_rows: int) -> list:
    ops = Launches()
    shrunk = lora.shrink(ops, FakeStack((num_rows, matrix.a.shape[3]), BFLOAT16), matrix, adapters)
    lora.expand(ops, shrunk, matrix, adapters, FakeStack((num_rows, matrix.part_ends[-1]), BFLOAT16))
    return ops.launched


def test_a_decode_of_many_adapters():
    """6 groups of 8 outputs and 36 tiles."""
    shrink, expand = launched(matrix_of((4096, 5120, 6144), 4096), rows_of(64, 36, 16), 64)
    how = {"overlaps": True, "ROW_TILES": 1}
    assert shrink == ("lora_shrink", (6, 36, 4), [64, 4096, 3, RANK, 1024], {"threads": 128, **how})
    assert expand == ("lora_expand", (12, 36), [4, 64, 6144, 3, RANK, 4096, 5120], how)


def test_one_row_splits_its_inputs():
    shrink, expand = launched(matrix_of((4096,), 14336), rows_of(1, 1, 16), 1)
    assert shrink[1:3] == ((2, 1, 14), [1, 14336, 1, RANK, 1024])
    assert expand[1:3] == ((8, 1), [14, 1, 4096, 1, RANK, 4096, 4096])


def test_a_long_prompt_takes_large_tiles():
    assert (lora.tile_rows(1024), lora.tile_rows(1025)) == (16, 32)
    shrink, expand = launched(matrix_of((640, 1280), 4096), rows_of(8192, 288, 32), 8192)
    assert shrink[1] == (2, 288, 1)
    assert expand[1] == (4, 288)
    assert shrink[3]["ROW_TILES"] == expand[3]["ROW_TILES"] == 2


def test_parts_share_no_block():
    """1032 columns take three blocks, 128 one."""
    _, expand = launched(matrix_of((1032, 1160, 1288), 256), rows_of(4, 4, 16), 4)
    assert expand[1] == (5, 4)


def test_what_the_kernels_do_not_take_is_refused():
    with pytest.raises(ValueError, match="lora_shrink: 260 inputs and rank 16"):
        launched(matrix_of((512,), 260), rows_of(1, 1, 16), 1)
    with pytest.raises(ValueError, match=r"lora_expand: outputs that end at \(516,\)"):
        launched(matrix_of((516,), 256), rows_of(1, 1, 16), 1)
    with pytest.raises(ValueError, match="tiles of 8 rows and 1 parts"):
        launched(matrix_of((512,), 256), rows_of(1, 1, 8), 1)


@pytest.mark.parametrize("tile_rows", [1, 16, 32])
def test_tiles_of_any_size_give_the_same(tile_rows):
    rng, ops = np.random.default_rng(0), NumpyOps(np.dtype(np.float32))
    case = lora_case(rng, "float32", "three", 70)
    rows = np.full(70, -1, np.int32)
    for slot, first, count in case.rows.tiles:
        rows[case.rows.rows[first : first + count]] = slot
    tiled = adapter_rows(rows, ops, tile_rows)
    assert tiled.tiles[:, 2].max() <= tile_rows
    np.testing.assert_array_equal(group_rows(rows, tile_rows)[0], case.rows.rows)
    outs = [case.out.copy(), case.out.copy()]
    for out, adapters in zip(outs, (case.rows, tiled), strict=True):
        ops.lora_expand(ops.lora_shrink(case.x, case.matrix, adapters), case.matrix, adapters, out)
    np.testing.assert_allclose(outs[1], outs[0], atol=1e-4)
