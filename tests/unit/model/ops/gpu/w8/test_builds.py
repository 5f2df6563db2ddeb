import pytest

from model.ops.gpu.w8.builds import (
    GEMV_W8_BUILDS,
    MAX_SMALL_M_ROWS,
    MAX_W8A16_ROWS,
    gemv_w8_build,
    small_m_fp8_build,
    small_m_w8a16_build,
)

H200 = 132, 227 << 10


@pytest.mark.parametrize("n", [1, 128, 1024, 4096, 5120, 6144, 8192, 28672, 57344, 128256])
def test_how_k_is_shared_out_does_not_depend_on_the_rows_of_x(n):
    assert len({small_m_fp8_build(m, n, *H200).split for m in range(1, MAX_SMALL_M_ROWS + 1)}) == 1
    assert len({small_m_w8a16_build(m, n, *H200).split for m in range(1, MAX_W8A16_ROWS + 1)}) == 1


@pytest.mark.parametrize("n", [1, 100, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 129, 256])
@pytest.mark.parametrize("build_of", [small_m_fp8_build, small_m_w8a16_build])
def test_a_build_holds_the_rows_and_fits(m, n, build_of):
    m = min(m, MAX_W8A16_ROWS) if build_of is small_m_w8a16_build else m
    build = build_of(m, n, *H200)
    assert build.cols >= m
    assert build.shared_bytes <= H200[1]
    blocks = build.num_blocks(n, H200[0])
    assert blocks <= H200[0]
    rounds = -(-n // (build.rows * (blocks // build.split)))
    assert blocks // build.split * build.rows * rounds >= n
    assert build.split == 1 or rounds == 1


def test_there_is_no_build_for_more_rows_or_a_device_with_little_memory():
    assert small_m_fp8_build(MAX_SMALL_M_ROWS + 1, 4096, *H200) is None
    assert small_m_fp8_build(256, 28672, 132, 99 << 10) is None
    assert small_m_w8a16_build(MAX_W8A16_ROWS + 1, 4096, *H200) is None
    assert gemv_w8_build(17, H200[1]) is None


@pytest.mark.parametrize("memory", [99 << 10, 163 << 10, 227 << 10])
def test_every_device_has_a_build_for_a_few_rows(memory):
    for rows in range(1, 17):
        build = gemv_w8_build(rows, memory)
        assert build in GEMV_W8_BUILDS
        assert build.shared_bytes <= memory
        assert rows <= 8 * build.col_tiles
