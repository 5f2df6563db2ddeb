"""What is kept of measured products, and which of them our kernels take, in which builds. No GPU is needed."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest

cuda_linear = pytest.importorskip(
    "model.ops.cuda_linear", reason="needs the packages of the cuda extra", exc_type=ImportError
)

ONE = cuda_linear.Product(1, 6144, 4096, "bfloat16", "bfloat16", False)
WAYS = {
    ONE: cuda_linear.Way(cuda_linear.SKINNY, 1),
    ONE._replace(m=32): cuda_linear.Way(cuda_linear.NARROW, 1),
    ONE._replace(m=64, has_bias=True): cuda_linear.Way(cuda_linear.CUBLASLT, 3),
}


def test_what_was_measured_is_found_again(tmp_path):
    path = tmp_path / "new" / "linear.json"
    cuda_linear.write_ways(path, WAYS)
    assert cuda_linear.read_ways(path) == WAYS
    assert [each.name for each in path.parent.iterdir()] == ["linear.json"]


def test_nothing_measured_yet_is_no_error(tmp_path, caplog):
    assert cuda_linear.read_ways(tmp_path / "linear.json") == {}
    assert caplog.text == ""


@pytest.mark.parametrize(
    "damage", ["", "{", "null", "[1]", "[[[1, 2], [3]]]", '[[[1, 2, 3, "a", "b", false], ["other", 0]]]', "\udcff"]
)
def test_a_damaged_file_is_measured_anew(tmp_path, caplog, damage):
    path = tmp_path / "linear.json"
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert cuda_linear.read_ways(path) == {}
    assert "measured anew" in caplog.text


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        cuda_linear.write_ways(in_the_way / "linear.json", WAYS)
    assert "cannot keep" in caplog.text


def test_the_kernel_for_few_rows_takes_few_rows_in_16_bits():
    assert cuda_linear.fits_skinny(ONE)
    assert cuda_linear.fits_skinny(ONE._replace(m=8, dtype="float16", out_dtype="float32"))
    for other in ({"m": 17}, {"k": 4100}, {"dtype": "float32"}):
        assert not cuda_linear.fits_skinny(ONE._replace(**other))


@pytest.mark.parametrize(
    ("rows", "kib", "build"),
    [(1, 227, 0), (8, 163, 0), (8, 99, 1), (9, 227, 2), (16, 227, 2), (16, 99, None), (17, 227, None)],
)
def test_a_device_takes_a_build_for_so_many_rows_that_it_has_shared_memory_for(rows, kib, build):
    assert cuda_linear.skinny_build(rows, kib << 10) == build
    if build is not None:
        assert cuda_linear.SKINNY_BUILDS[build].shared_bytes <= kib << 10


def test_the_kernel_for_some_rows_takes_up_to_128_in_16_bits():
    for fits in ({"m": 17}, {"m": 128, "dtype": "float16", "out_dtype": "float32"}):
        assert cuda_linear.fits_narrow(ONE._replace(**fits))
    for other in ({"m": 129}, {"m": 64, "k": 4100}, {"m": 64, "dtype": "float32"}):
        assert not cuda_linear.fits_narrow(ONE._replace(**other))


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
    build = cuda_linear.narrow_build(split, m, n, 132, 227 << 10)
    assert build.rows == rows
    assert build.cols - 32 < m <= build.cols
    assert build.num_blocks(n, 132) == num_blocks
    assert 160 << 10 < build.shared_bytes <= 227 << 10
    assert replace(build, stages=build.stages + 1).shared_bytes > 227 << 10


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_every_build_fits_and_fetches_no_further_ahead_than_its_ring(split, num_sms):
    asked = itertools.product(range(1, 129), [1, 33, *range(96, 8448, 520), 14336, 28672, 57344, 128256, 262144])
    builds = {cuda_linear.narrow_build(split, m, n, num_sms, 227 << 10) for m, n in asked} - {None}
    assert len(builds) > 10
    for build in builds:
        assert build.shared_bytes <= 227 << 10
        assert 0 < build.defines["AHEAD"] <= build.stages
        assert 32 <= build.rows <= 128
        assert build.rows % 8 == 0


@pytest.mark.parametrize(("split", "m", "n", "kib"), [(1, 129, 4096, 227), (2, 64, 28672, 227), (1, 128, 28672, 48)])
def test_there_is_no_build_for_more_rows_or_tiles_or_for_less_shared_memory(split, m, n, kib):
    assert cuda_linear.narrow_build(split, m, n, 132, kib << 10) is None


@pytest.mark.parametrize("path", sorted(cuda_linear.MEASURED.glob("*.json")), ids=lambda path: path.name)
def test_what_came_with_the_package_is_whole(path):
    ways = cuda_linear.read_ways(path)
    assert {product.m for product in ways} > {1, 64, 512}
    fits = {cuda_linear.SKINNY: cuda_linear.fits_skinny, cuda_linear.NARROW: cuda_linear.fits_narrow}
    assert all(way.kind == cuda_linear.CUBLASLT or fits[way.kind](product) for product, way in ways.items())
