"""Builds of the experts' kernels, whose shared memory fits the device. No GPU is needed."""

from __future__ import annotations

import pytest

from model.ops.gpu.experts.builds import (
    MAX_EXPERTS,
    gemv_build,
    gemv_w4_build,
    gemv_w8_build,
    sm90_build,
    takes_sm90,
    w4_sm90_build,
)
from model.ops.gpu.int4.builds import Int4Layout

SM_BYTES = {"sm_80": (164 << 10, 163 << 10), "sm_86": (100 << 10, 99 << 10), "sm_90": (228 << 10, 227 << 10)}
"""Shared memory of an SM and of a block."""

LAYOUTS = [Int4Layout(1, False, True), Int4Layout(4, True, False)]


@pytest.mark.parametrize("choose", [gemv_build, gemv_w8_build])
def test_rows_that_can_meet_at_one_expert_fit_or_its_mean_does(choose):
    for num_rows in (1, 8, 9, 64):
        for mean_pairs in (1 / 16, 1, 4, 5, 8):
            build = choose(num_rows, mean_pairs)
            assert num_rows <= 8 * build.col_tiles or mean_pairs <= 4 * build.col_tiles


@pytest.mark.parametrize("device", SM_BYTES)
def test_gemv_blocks_fit(device: str):
    of_sm, of_block = SM_BYTES[device]
    for build in (gemv_build(1, 1), gemv_build(64, 8), gemv_w8_build(1, 1), gemv_w8_build(64, 8)):
        shared_bytes = build.shared_bytes + 4 * MAX_EXPERTS
        assert shared_bytes <= of_block
        if device == "sm_90":
            assert build.blocks_per_sm * (build.shared_bytes + 4 * 128 + 1024) <= of_sm


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_hopper_product_takes_tiles_of_about_a_mean_expert(is_fp8: bool):
    builds = [sm90_build(mean, is_fp8, 227 << 10) for mean in (9, 40, 100, 1000)]
    assert [build.cols for build in builds if build is not None] == [32, 64, 128, 128]
    assert all(build is not None and build.stages >= 3 for build in builds)
    assert all(build is not None and build.shared_bytes + 4 * MAX_EXPERTS <= 227 << 10 for build in builds)
    assert sm90_build(100, is_fp8, 99 << 10) is None


def test_few_rows_never_take_the_hopper_product():
    for is_dense in (False, True):
        assert not takes_sm90(16, 16, is_dense)
        assert takes_sm90(64, 16, is_dense)
        assert takes_sm90(64, 4, is_dense) is not is_dense


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("device", SM_BYTES)
def test_blocks_of_4_bit_weights_fit(device: str, layout: Int4Layout):
    of_sm, of_block = SM_BYTES[device]
    for build in (gemv_w4_build(1, 1), gemv_w4_build(64, 8)):
        assert build.shared_bytes(layout) + 4 * MAX_EXPERTS <= of_block
        if device == "sm_90":
            assert build.blocks_per_sm * (build.shared_bytes(layout) + 4 * 128 + 1024) <= of_sm


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_hopper_product_of_4_bit_weights_takes_tiles_of_about_a_mean_expert(layout: Int4Layout):
    builds = [w4_sm90_build(mean, layout, 227 << 10) for mean in (9, 40, 100, 1000)]
    assert [build.cols for build in builds if build is not None] == [32, 64, 128, 128]
    assert all(build is not None and build.stages >= 3 for build in builds)
    assert all(build is not None and build.shared_bytes + 4 * MAX_EXPERTS <= 227 << 10 for build in builds)
    assert w4_sm90_build(100, layout, 99 << 10) is None
