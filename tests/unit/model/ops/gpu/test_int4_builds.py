"""Builds of products with 4-bit weights."""

import pytest

from model.ops.gpu.int4.builds import Int4Layout, gemv_w4_build, small_m_w4_build

H200 = (132, 227 << 10)
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (16, 128), (128256, 4096)]
LAYOUTS = [Int4Layout(1, False, True), Int4Layout(4, True, False)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_number_of_rows_fits_in_shared_memory_and_in_one_split(n, k, layout):
    builds = [small_m_w4_build(m, n, k, layout, *H200) for m in (1, 17, 64, 65, 200, 256, 300, 512, 1024)]
    assert all(build.shared_bytes <= H200[1] for build in builds)
    assert len({build.split for build in builds}) == 1


@pytest.mark.parametrize(("m", "n", "k"), [(64, 4096, 14336), (512, 6144, 4096), (512, 28672, 4096), (300, 48, 128)])
def test_a_grid_is_whole_clusters_of_a_tile_or_fits_the_sms(m, n, k):
    build = small_m_w4_build(m, n, k, LAYOUTS[0], *H200)
    tiles = -(-n // (16 * build.blocks)) * -(-m // build.cols)
    blocks = build.num_blocks(m, n, H200[0])
    assert blocks == build.split * tiles if build.split > 1 else blocks <= min(tiles, H200[0])


def test_rows_take_the_tiles_that_were_measured_quickest():
    found = {m: small_m_w4_build(m, 6144, 4096, LAYOUTS[0], *H200) for m in (32, 64, 256, 512)}
    assert {m: (build.blocks, build.cols) for m, build in found.items()} == {
        32: (8, 32), 64: (8, 64), 256: (12, 128), 512: (12, 128),
    }  # fmt: skip


def test_there_is_no_build_for_too_little_memory():
    assert small_m_w4_build(256, 4096, 4096, LAYOUTS[0], 132, 32 << 10) is None


def test_few_rows_are_multiplied_at_once_or_in_a_few_launches():
    layout = LAYOUTS[0]
    assert gemv_w4_build(1, 4096, 14336, layout, *H200).x_rows == 1
    assert gemv_w4_build(8, 6144, 4096, layout, *H200).x_rows == 8
    assert gemv_w4_build(8, 4096, 14336, layout, *H200).x_rows == 4
    assert gemv_w4_build(16, 4096, 14336, layout, 132, 99 << 10) is None
    assert gemv_w4_build(17, 4096, 4096, layout, *H200) is None


@pytest.mark.parametrize(("m", "n", "row_tiles"), [(1, 4096, 2), (4, 6144, 3), (1, 28672, 2)])
def test_tiles_leave_few_sms_without_work(m, n, row_tiles):
    assert gemv_w4_build(m, n, 4096, LAYOUTS[0], *H200).row_tiles == row_tiles


def test_a_small_product_of_one_row_leaves_registers_but_no_place_for_a_second_block():
    build = gemv_w4_build(1, 6144, 4096, LAYOUTS[0], *H200)
    assert build.shares_sm
    assert build.row_tiles == 2
    assert 2 * build.shared_bytes(4096, LAYOUTS[0]) > 228 << 10
    assert not gemv_w4_build(2, 6144, 4096, LAYOUTS[0], *H200).shares_sm
    assert not gemv_w4_build(1, 28672, 4096, LAYOUTS[0], *H200).shares_sm
    assert not gemv_w4_build(1, 6144, 4096, LAYOUTS[0], 132, 99 << 10).shares_sm


def test_a_large_product_of_one_row_has_more_stages_where_they_fit():
    assert [gemv_w4_build(1, 28672, 4096, LAYOUTS[0], *H200, parts).stages for parts in (1, 2)] == [3, 3]
    assert gemv_w4_build(1, 28672, 4096, LAYOUTS[0], 132, 99 << 10, 2).stages == 2
    assert gemv_w4_build(4, 28672, 4096, LAYOUTS[0], *H200).stages == 2
    assert gemv_w4_build(1, 4096, 14336, LAYOUTS[0], *H200).stages == 2


def test_tiles_of_a_gated_product_hold_as_much_of_both():
    assert all(gemv_w4_build(m, 6144, 4096, LAYOUTS[0], *H200, 2).row_tiles == 2 for m in (1, 4, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("memory", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_device_has_a_build_for_one_row(n, k, layout, memory):
    build = gemv_w4_build(1, n, k, layout, 132, memory)
    assert build.shared_bytes(k, layout) <= memory
