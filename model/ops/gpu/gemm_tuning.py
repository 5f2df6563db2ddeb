"""Files of measured GEMM algorithms, shipped with the package or cached.

A file's name is a digest of the device, cuBLASLt's version, and our kernels without comments and spaces, so rewording a
comment keeps the file valid.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from model.ops.gpu.kernels import source_path
from model.ops.gpu.linear_builds import AHEAD_BYTES, GEMV_BUILDS, MAX_SMALL_M_ROWS, SMALL_M_SPLITS

CUBLASLT, GEMV, SMALL_M = "cublasLt", "gemv", "small_m_sm90"

SHIPPED_TUNING = Path(__file__).with_name("measured")

_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_log = logging.getLogger(__name__)


class GemmShape(NamedTuple):
    """out [m, n] = x [m, k] @ weight [n, k].T (+ bias)."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    has_bias: bool


class GemmAlgorithm(NamedTuple):
    kind: str  # CUBLASLT, GEMV or SMALL_M
    choice: int  # index in cuBLASLt's estimates, GEMV_BUILDS or SMALL_M_SPLITS


def fits_gemv(shape: GemmShape) -> bool:
    """Return whether gemv.cu supports the shape, given a build."""
    most_rows = max(build.max_rows for build in GEMV_BUILDS)
    return shape.m <= most_rows and shape.k % 8 == 0 and shape.dtype != "float32"


def fits_small_m(shape: GemmShape) -> bool:
    return shape.m <= MAX_SMALL_M_ROWS and shape.k % 8 == 0 and shape.dtype != "float32"


def file_name(device_name: str, cublaslt_version: int) -> str:
    parts = [device_name, str(cublaslt_version), repr(GEMV_BUILDS), repr((SMALL_M_SPLITS, AHEAD_BYTES))]
    for kernel, headers in ((GEMV, ("gemv.cuh", "dense_product.cuh")), (SMALL_M, ("small_m.cuh",))):
        path = source_path(kernel)
        sources = (path, *map(path.with_name, headers))
        parts += [code_of(source.read_text(encoding="utf-8")) for source in sources]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return f"linear-{digest}.json"


def code_of(source: str) -> str:
    """Strip comments, and white space outside string literals."""
    without_comments = _COMMENT.sub(lambda found: found[1] or " ", source)
    literals_and_code = re.split(r'("(?:\\.|[^"\\])*")', without_comments)
    return "".join(each if each.startswith('"') else re.sub(r"\s+", "", each) for each in literals_and_code)


def read_tuning(path: Path) -> dict[GemmShape, GemmAlgorithm]:
    """Return a file's content; empty if it is missing or damaged."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        tuning = {GemmShape(*shape): GemmAlgorithm(*algorithm) for shape, algorithm in rows}
        kinds = (CUBLASLT, GEMV, SMALL_M)
        if not all(algorithm.kind in kinds and algorithm.choice >= 0 for algorithm in tuning.values()):
            raise ValueError("an unknown algorithm")
        return tuning
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        _log.warning("cannot use the measured products in %s, they are measured anew: %s", path, error)
        return {}


def write_tuning(path: Path, tuning: dict[GemmShape, GemmAlgorithm]) -> None:
    """Replace the file atomically; only warn on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(sorted(tuning.items()), file)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("cannot keep measured products in %s: %s", path, error)
