"""Tuning files, and which shapes our kernels compute, in which builds. No GPU is needed."""

from __future__ import annotations

import itertools
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from model.ops.gpu.linear_builds import GEMV_BUILDS, exact_gemv_build, gemv_build, one_row_build, small_m_build

tuning = pytest.importorskip(
    "model.ops.gpu.gemm_tuning", reason="no compiler: needs the packages of the compile extra", exc_type=ImportError
)

H200 = 132, 227 << 10
"""SMs and bytes of shared memory of a block."""
MEASURED_ON = [("NVIDIA H200", 130100)]
"""Device name and cuBLASLt version of each shipped file."""

ONE = tuning.GemmShape(1, 6144, 4096, "bfloat16", "bfloat16", False)
TUNING = {
    ONE: tuning.GemmAlgorithm(tuning.GEMV, 1),
    ONE._replace(m=32): tuning.GemmAlgorithm(tuning.SMALL_M, 1),
    ONE._replace(m=64, has_bias=True): tuning.GemmAlgorithm(tuning.CUBLASLT, 3),
}


def test_what_was_measured_is_found_again(tmp_path):
    path = tmp_path / "new" / "linear.json"
    tuning.write_tuning(path, TUNING)
    assert tuning.read_tuning(path) == TUNING
    assert [each.name for each in path.parent.iterdir()] == ["linear.json"]


def test_nothing_measured_yet_is_no_error(tmp_path, caplog):
    assert tuning.read_tuning(tmp_path / "linear.json") == {}
    assert caplog.text == ""


@pytest.mark.parametrize(
    "damage", ["", "{", "null", "[1]", "[[[1, 2], [3]]]", '[[[1, 2, 3, "a", "b", false], ["other", 0]]]', "\udcff"]
)
def test_a_damaged_file_is_measured_anew(tmp_path, caplog, damage):
    path = tmp_path / "linear.json"
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert tuning.read_tuning(path) == {}
    assert "measured anew" in caplog.text


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        tuning.write_tuning(in_the_way / "linear.json", TUNING)
    assert "cannot keep" in caplog.text


def test_more_rows_are_summed_in_the_order_of_one_row():
    for index, one in enumerate(GEMV_BUILDS):
        for num_rows in range(1, 25):
            build = exact_gemv_build(index, num_rows, (4096, 14336), *H200)
            assert num_rows <= build.max_rows <= max(one.max_rows, num_rows + 7)
            assert (build.warps, build.span) == (one.warps, one.span)
            assert build.shared_bytes <= 227 << 10
        assert exact_gemv_build(index, 25, (6144, 4096), *H200) is None
    assert exact_gemv_build(0, 1, (6144, 4096), *H200) == GEMV_BUILDS[0]


def test_exact_rows_without_room_for_wide_tiles_take_one_row_tiles():
    narrow = GEMV_BUILDS[0]._replace(col_tiles=2)
    assert exact_gemv_build(0, 16, (6144, 4096), 132, narrow.shared_bytes) == narrow
    assert exact_gemv_build(0, 16, (6144, 4096), 132, narrow.shared_bytes - 1) is None
    wide = exact_gemv_build(0, 16, (6144, 4096), *H200)
    assert wide.row_tiles == 2
    assert wide.defines["STEP"] == 64


def test_the_kernel_for_few_rows_takes_few_rows_in_16_bits():
    assert tuning.fits_gemv(ONE)
    assert tuning.fits_gemv(ONE._replace(m=8, dtype="float16", out_dtype="float32"))
    for other in ({"m": 17}, {"k": 4100}, {"dtype": "float32"}):
        assert not tuning.fits_gemv(ONE._replace(**other))


@pytest.mark.parametrize(
    ("rows", "kib", "build"),
    [(1, 227, 0), (8, 163, 0), (8, 99, 1), (9, 227, 2), (16, 227, 2), (16, 99, None), (17, 227, None)],
)
def test_a_build_for_a_row_count_fits_the_shared_memory(rows, kib, build):
    assert gemv_build(rows, kib << 10) == build
    if build is not None:
        assert GEMV_BUILDS[build].shared_bytes <= kib << 10


def test_the_kernel_for_some_rows_takes_up_to_128_in_16_bits():
    for fits in ({"m": 17}, {"m": 128, "dtype": "float16", "out_dtype": "float32"}):
        assert tuning.fits_small_m(ONE._replace(**fits))
    for other in ({"m": 129}, {"m": 64, "k": 4100}, {"m": 64, "dtype": "float32"}):
        assert not tuning.fits_small_m(ONE._replace(**other))


@pytest.mark.parametrize(
    ("split", "m", "n", "rows", "num_blocks"),
    [
        (1, 64, 28672, 112, 128),
        (1, 64, 6144, 48, 128),
        (2, 64, 6144, 96, 128),
        (1, 17, 4096, 32, 128),
        (2, 128, 4096, 64, 128),
        (1, 96, 128256, 128, 126),
        (1, 64, 33, 32, 2),
        (1, 128, 96, 32, 3),
        (2, 64, 33, 32, 4),
    ],
)
def test_tiles_are_such_that_all_sms_have_equally_many(split, m, n, rows, num_blocks):
    build = small_m_build(split, m, n, 132, 227 << 10)
    assert build.rows == rows
    assert build.cols - 32 < m <= build.cols
    assert build.num_blocks(n, 132) == num_blocks
    assert 160 << 10 < build.shared_bytes <= 227 << 10
    assert replace(build, stages=build.stages + 1).shared_bytes > 227 << 10


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_every_build_fits_and_fetches_no_further_ahead_than_its_ring(split, num_sms):
    asked = itertools.product(range(1, 129), [1, 33, *range(96, 8448, 520), 14336, 28672, 57344, 128256, 262144])
    builds = {small_m_build(split, m, n, num_sms, 227 << 10) for m, n in asked} - {None}
    assert len(builds) > 10
    for build in builds:
        assert build.shared_bytes <= 227 << 10
        assert 0 < build.defines["AHEAD"] <= build.stages
        assert 32 <= build.rows <= 128
        assert build.rows % 8 == 0


@pytest.mark.parametrize(("split", "m", "n", "kib"), [(1, 129, 4096, 227), (2, 64, 28672, 227), (1, 128, 28672, 48)])
def test_there_is_no_build_for_more_rows_or_tiles_or_for_less_shared_memory(split, m, n, kib):
    assert small_m_build(split, m, n, 132, kib << 10) is None


@pytest.mark.parametrize(("k", "fills"), [(2048, False), (2056, True), (14336, True)])
def test_one_row_fills_rings_that_a_tile_fills(k, fills):
    usual, build = GEMV_BUILDS[0], one_row_build(GEMV_BUILDS[0], k)
    assert (build.warps, build.span, build.stages) == (usual.warps, usual.span, usual.stages)
    assert build.fills == fills
    assert build.row_bytes == (2 * k if k <= 4096 else 0)
    assert build.shared_bytes < usual.shared_bytes


@pytest.mark.parametrize(("rows", "is_ahead"), [(2, False), (5, True), (12, True)])
@pytest.mark.parametrize(("k", "fills"), [(2048, False), (4096, True)])
def test_few_exact_rows_fill_rings_that_a_tile_fills(rows, is_ahead, k, fills):
    build = exact_gemv_build(0, rows, (6144, k), *H200)
    assert (build.fills, build.is_streamed, build.reads_x_ahead) == (fills, True, is_ahead)


@pytest.mark.parametrize(("rows", "kept"), [(2, 0), (4, 0), (9, 9)])
def test_few_exact_rows_are_in_shared_memory_for_many_tiles(rows, kept):
    build = exact_gemv_build(0, rows, (28672, 4096), *H200)
    assert build.row_bytes == rows * (8192 + 64)
    assert (build.kept_rows, build.reads_x_ahead) == (kept, False)
    for others in (5, 8, 10):
        assert exact_gemv_build(0, others, (28672, 4096), *H200).row_bytes == 0
    assert exact_gemv_build(0, rows, (16000, 4096), *H200).row_bytes == 0


@pytest.mark.parametrize(("rows", "n", "row_tiles"), [(8, 4096, 1), (9, 4096, 2), (9, 6144, 1), (12, 4224, 2)])
def test_more_than_eight_exact_rows_have_wide_tiles_where_a_block_has_one(rows, n, row_tiles):
    build = exact_gemv_build(0, rows, (n, 14336), *H200)
    assert build.row_tiles == row_tiles
    assert build.kept_rows == (rows if row_tiles == 2 else 0)


def shipped() -> list[Path]:
    return sorted(tuning.SHIPPED_TUNING.glob("*.json"))


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.name)
def test_a_shipped_file_is_whole(path):
    found = tuning.read_tuning(path)
    assert {shape.m for shape in found} > {1, 64, 512}
    fits = {tuning.GEMV: tuning.fits_gemv, tuning.SMALL_M: tuning.fits_small_m}
    kinds = {algorithm.kind for algorithm in found.values()}
    assert kinds == {tuning.CUBLASLT, tuning.GEMV, tuning.SMALL_M}
    for shape, algorithm in found.items():
        assert algorithm.kind == tuning.CUBLASLT or fits[algorithm.kind](shape)


def test_every_shipped_file_is_found_on_the_device_it_was_measured_on():
    """Fails when the code of a kernel changed: measure again, or rename the file if the machine code is the same."""
    assert {path.name for path in shipped()} == {tuning.file_name(*measured_on) for measured_on in MEASURED_ON}


def copied_sources(monkeypatch, tmp_path) -> Path:
    sources = shutil.copytree(tuning.source_path(tuning.GEMV).parent, tmp_path / "linear")
    monkeypatch.setattr(tuning, "source_path", lambda name: sources / f"{name}.cu")
    return sources


@pytest.mark.parametrize("file", ["gemv.cu", "gemv.cuh", "small_m_sm90.cu", "small_m.cuh"])
def test_a_comment_does_not_drop_the_measurements_and_a_changed_kernel_does(monkeypatch, tmp_path, file):
    path, name = copied_sources(monkeypatch, tmp_path) / file, tuning.file_name(*MEASURED_ON[0])
    source = path.read_text()
    path.write_text(f"/* reworded\n */ {source}\n\n// measured again".replace("    ", "  "))
    assert tuning.file_name(*MEASURED_ON[0]) == name
    path.write_text(source + "\nint more;")
    assert tuning.file_name(*MEASURED_ON[0]) != name


def test_another_device_or_cublaslt_has_another_file():
    names = {tuning.file_name(*each) for each in [("NVIDIA H200", 130100), ("NVIDIA H100", 130100), ("NVIDIA H200", 1)]}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("a // b\nc", "ac"),
        ("a /* b\n// c */ d", "ad"),
        ('f("x  // y", 1);  // z', 'f("x  // y",1);'),
        ('f("a \\" /* b */");', 'f("a \\" /* b */");'),
    ],
)
def test_the_code_of_a_source_is_without_comments_and_white_space(source, code):
    assert tuning.code_of(source) == code
