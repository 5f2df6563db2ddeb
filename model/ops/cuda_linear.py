"""How a product of rows and weights is computed: by one of cuBLASLt's algorithms, or for few rows by `skinny_linear`
and, on Hopper, `narrow_linear`.

Which is quickest is measured for the shapes that `tune` is told of, and kept on disk beside the compiled kernels, so
that the next process finds it there and makes the same choice. Other shapes go to cuBLASLt's own first choice. What was
measured beforehand comes with the package: service/cli/bench/measure_products.py makes these files.

`ops` is the `CudaOps` in hand; of it, `stream`, `launch`, `capture`, `scratch`, `empty`, `rms_norm`, `mark`,
`elapsed_s`, `tensor_maps`, `num_sms`, `max_shared_bytes`, `arch`, `dtype` and `device_name` are used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from nvmath.bindings import cublasLt as lt

from model.ops.gemm import BEST_ALIGNMENT_BYTES, Gemm, GemmError
from model.ops.interface import Array
from model.ops.kernels import cache_folder, source_folder
from model.ops.narrow_builds import AHEAD_BYTES, MAX_NARROW_ROWS, NARROW_SPLITS, NarrowBuild, narrow_build
from model.ops.skinny_builds import SKINNY_BUILDS, SkinnyBuild, skinny_build

CUBLASLT, SKINNY, NARROW = "cublasLt", "skinny_linear", "narrow_linear"

MEASURED = Path(__file__).with_name("measured")
"""What came with the package, by the same names."""

MEASURED_S = 1e-3
"""About how long one way is measured for one product, three times over."""

MIN_GAIN = 0.02
"""What another way has to save over cuBLASLt's first choice: less than this is noise."""

_THREADS = 256
_FLOAT32 = np.dtype(np.float32)
_log = logging.getLogger(__name__)


class Product(NamedTuple):
    """A shape that is measured once: out [m, n] = x [m, k] @ weight [n, k].T (+ bias)."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    has_bias: bool


class Way(NamedTuple):
    """Which code computes a product: of several that give the same, the one that was quickest."""

    kind: str  # CUBLASLT, SKINNY or NARROW
    index: int  # of cuBLASLt's algorithms, best first by its own estimate, of SKINNY_BUILDS or of NARROW_SPLITS


FIRST_CHOICE = Way(CUBLASLT, 0)


class Linear:
    """Products of one backend, and what is known of their speed."""

    def __init__(self, ops):
        self._ops = ops
        self._gemm = Gemm(ops.stream)
        self._path = cache_folder() / file_name(ops.device_name)
        self._ways = {**read_ways(MEASURED / self._path.name), **read_ways(self._path)}

    def __call__(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        """out [M, N] = x [M, K] @ weight [N, K].T + bias [N], all C-contiguous; M, N, K of at least 1."""
        way = self._ways.get(_product(x, weight, bias, out), FIRST_CHOICE) if self._ways else FIRST_CHOICE
        if way != FIRST_CHOICE and (x.data.ptr | weight.data.ptr | out.data.ptr) % BEST_ALIGNMENT_BYTES:
            way = FIRST_CHOICE
        self._carry_out(way, x, weight, bias, out)

    def tune(self, weights: Sequence[Array], bias: Array | None, num_rows: Sequence[int], out_dtype: np.dtype) -> None:
        """Find the quickest way for products of `num_rows` rows each with matrices of this one shape [N, K].

        `weights` are used in turn: together they should be far larger than the L2, as a model's layers are. Shapes
        that are known, from the disk or from before, cost nothing; others about 30 ms each. Not while capturing.
        """
        ops, (n, k), found = self._ops, weights[0].shape, {}
        products = [Product(m, n, k, ops.dtype.name, out_dtype.name, bias is not None) for m in num_rows]
        products = [product for product in products if product not in self._ways]
        if not products:
            return
        most = max(product.m for product in products)
        x, out = ops.empty((most, k), ops.dtype), ops.empty((most, n), out_dtype)  # one for all: the pool keeps them
        self._fill(x, weights[0])
        for product in products:
            found[product] = self._quickest(product, x[: product.m], weights, bias, out[: product.m])
        self._ways = {**read_ways(self._path), **self._ways, **found}
        write_ways(self._path, self._ways)

    def _carry_out(self, way: Way, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        if way.kind == SKINNY:
            self._launch_skinny(SKINNY_BUILDS[way.index], x, weight, bias, out)
        elif way.kind == NARROW:
            build = self._narrow_build(way.index, len(x), len(weight))
            self._launch_narrow(build, x, weight, bias, out)
        elif not self._gemm(x, weight, bias, out, way.index) and bias is not None:
            grid = (len(out), math.ceil(len(weight) / _THREADS))
            out_float = int(out.dtype == _FLOAT32)
            self._ops.launch("add_bias", grid, (out, bias, np.int32(len(weight))), overlaps=True, OUT_FLOAT=out_float)

    def _launch_skinny(self, build: SkinnyBuild, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        ops, (n, k) = self._ops, weight.shape
        tiles = math.ceil(n / (16 * build.row_tiles))
        ops.launch(
            "skinny_linear",
            (min(tiles, build.blocks_per_sm * ops.num_sms),),
            (x, weight, bias, out, np.int32(len(x)), np.int32(n), np.int32(k)),
            threads=32 * build.warps,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **build.defines,
        )

    def _narrow_build(self, index: int, m: int, n: int) -> NarrowBuild | None:
        return narrow_build(NARROW_SPLITS[index], m, n, self._ops.num_sms, self._ops.max_shared_bytes)

    def _launch_narrow(self, build: NarrowBuild, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        ops, (n, k) = self._ops, weight.shape
        x_map = ops.tensor_maps.get(x, x.shape[::-1], (64, build.cols))
        weight_map = ops.tensor_maps.get(weight, (k, n), (64, build.rows))
        ops.launch(
            "narrow_linear",
            (build.num_blocks(n, ops.num_sms),),
            (x_map, weight_map, bias, out, np.int32(len(x)), np.int32(n), np.int32(k)),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **build.defines,
        )

    def _fill(self, x: Array, weight: Array) -> None:
        """Numbers of the size that a model has: a product of zeros runs quicker than one of data."""
        x.data.memset_async(0, x.nbytes, self._ops.stream)
        x.data.copy_from_device_async(weight.data, min(x.nbytes, weight.nbytes), self._ops.stream)

    def _quickest(self, product: Product, x: Array, weights: Sequence[Array], bias: Array | None, out: Array) -> Way:
        ways = [Way(CUBLASLT, index) for index in range(self._gemm.num_algorithms(x, weights[0], bias, out))]
        ways += self._own_ways(product)
        seconds = {}
        for way in ways:
            try:
                seconds[way] = self._seconds(way, x, weights, bias, out)
            except (GemmError, lt.cuBLASLtError) as error:
                _log.warning("%s cannot be computed by %s: %s", product, way, error)
        best = min(seconds, key=seconds.get)
        first = seconds.get(FIRST_CHOICE, math.inf)
        if seconds[best] > (1 - MIN_GAIN) * first:
            best = FIRST_CHOICE
        _log.debug("%s: %.1f us by %s, %.1f by %s", product, seconds[best] * 1e6, best, first * 1e6, FIRST_CHOICE)
        return best

    def _own_ways(self, product: Product) -> list[Way]:
        """Those by our kernels."""
        build = skinny_build(product.m, self._ops.max_shared_bytes) if fits_skinny(product) else None
        if build is not None:
            return [Way(SKINNY, build)]
        if self._ops.arch != "90a" or not fits_narrow(product):
            return []
        indices = range(len(NARROW_SPLITS))
        return [Way(NARROW, index) for index in indices if self._narrow_build(index, product.m, product.n) is not None]

    def _seconds(self, way: Way, x: Array, weights: Sequence[Array], bias: Array | None, out: Array) -> float:
        """The least time of one product in a graph. It stands behind a small kernel, as products do in a step: what a
        way gains by beginning before that one ends counts as well.
        """
        ops = self._ops

        def launch(weight: Array) -> None:
            with ops.scratch():
                self._carry_out(way, ops.rms_norm(x, weight[0], 1e-5), weight, bias, out)

        launch(weights[-1])  # loads the kernel
        begin = ops.mark()
        launch(weights[0])
        num_launches = min(32, max(4, round(MEASURED_S / ops.elapsed_s(begin, ops.mark()))))
        rotated = [weights[index % len(weights)] for index in range(num_launches)]
        replay = ops.capture(lambda: [launch(weight) for weight in rotated])
        times = []
        for _ in range(4):
            begin = ops.mark()
            replay()
            times.append(ops.elapsed_s(begin, ops.mark()) / num_launches)
        return min(times[1:])


def fits_skinny(product: Product) -> bool:
    """Whether skinny_linear.cu takes it, where it is built for so many rows."""
    few = max(build.max_rows for build in SKINNY_BUILDS)
    return product.m <= few and product.k % 8 == 0 and product.dtype != "float32"


def fits_narrow(product: Product) -> bool:
    """Whether narrow_linear.cu takes it."""
    return product.m <= MAX_NARROW_ROWS and product.k % 8 == 0 and product.dtype != "float32"


def _product(x: Array, weight: Array, bias: Array | None, out: Array) -> Product:
    return Product(len(x), *weight.shape, _name(x.dtype), _name(out.dtype), bias is not None)


@functools.cache
def _name(dtype: np.dtype) -> str:
    return dtype.name


def file_name(device_name: str) -> str:
    """One file for each device, cuBLASLt and state of our kernels: other ones, other speeds."""
    parts = [device_name, str(lt.get_version()), repr(SKINNY_BUILDS), repr((NARROW_SPLITS, AHEAD_BYTES))]
    parts += [(source_folder() / f"{kernel}.cu").read_text(encoding="utf-8") for kernel in (SKINNY, NARROW)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return f"linear-{digest}.json"


def read_ways(path: Path) -> dict[Product, Way]:
    """What is kept in a file; nothing where there is none, or one that is damaged."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        ways = {Product(*product): Way(*way) for product, way in rows}
        if not all(way.kind in (CUBLASLT, SKINNY, NARROW) and way.index >= 0 for way in ways.values()):
            raise ValueError("an unknown way")
        return ways
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        _log.warning("cannot use the measured products in %s, they are measured anew: %s", path, error)
        return {}


def write_ways(path: Path, ways: dict[Product, Way]) -> None:
    """Whole or not at all, however many processes write at once. A cache that cannot be written is only slow."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(sorted(ways.items()), file)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("cannot keep measured products in %s: %s", path, error)
