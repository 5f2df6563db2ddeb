"""What is kept of measured products, and which of them the kernel for few rows takes. No GPU is needed."""

from __future__ import annotations

import logging

import pytest

cuda_linear = pytest.importorskip(
    "model.ops.cuda_linear", reason="needs the packages of the cuda extra", exc_type=ImportError
)

ONE = cuda_linear.Product(1, 6144, 4096, "bfloat16", "bfloat16", False)
WAYS = {
    ONE: cuda_linear.Way(cuda_linear.SKINNY, 1),
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


@pytest.mark.parametrize("path", sorted(cuda_linear.MEASURED.glob("*.json")), ids=lambda path: path.name)
def test_what_came_with_the_package_is_whole(path):
    ways = cuda_linear.read_ways(path)
    assert {product.m for product in ways} > {1, 64, 512}
    assert all(way.kind == cuda_linear.CUBLASLT or cuda_linear.fits_skinny(product) for product, way in ways.items())
