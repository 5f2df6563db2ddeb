"""The measured GEMM algorithm of each shape, in files: shipped with the package, and cached on each machine.

A file is named by a digest of what its times depend on: the device, cuBLASLt's version, and the code of our kernels
without comments, spaces and line breaks. Rewording a comment keeps the measurements; changing a kernel drops them.
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
"""The folder of files that come with the package."""

_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_log = logging.getLogger(__name__)


class GemmShape(NamedTuple):
    """A shape that is measured once: out [m, n] = x [m, k] @ weight [n, k].T (+ bias)."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    has_bias: bool


class GemmAlgorithm(NamedTuple):
    """The code that computes a product."""

    kind: str  # CUBLASLT, GEMV or SMALL_M
    choice: int  # of cuBLASLt's algorithms, best first by its own estimate, of GEMV_BUILDS or of SMALL_M_SPLITS


def fits_gemv(shape: GemmShape) -> bool:
    """Whether gemv.cu computes it, given a build for that many rows."""
    most_rows = max(build.max_rows for build in GEMV_BUILDS)
    return shape.m <= most_rows and shape.k % 8 == 0 and shape.dtype != "float32"


def fits_small_m(shape: GemmShape) -> bool:
    """Whether small_m_sm90.cu computes it."""
    return shape.m <= MAX_SMALL_M_ROWS and shape.k % 8 == 0 and shape.dtype != "float32"


def file_name(device_name: str, cublaslt_version: int) -> str:
    """One file for each device, cuBLASLt and code of our kernels."""
    parts = [device_name, str(cublaslt_version), repr(GEMV_BUILDS), repr((SMALL_M_SPLITS, AHEAD_BYTES))]
    parts += [code_of(source_path(kernel).read_text(encoding="utf-8")) for kernel in (GEMV, SMALL_M)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return f"linear-{digest}.json"


def code_of(source: str) -> str:
    """A CUDA source without comments and white space, except inside string literals."""
    without_comments = _COMMENT.sub(lambda found: found[1] or " ", source)
    literals_and_code = re.split(r'("(?:\\.|[^"\\])*")', without_comments)
    return "".join(each if each.startswith('"') else re.sub(r"\s+", "", each) for each in literals_and_code)


def read_tuning(path: Path) -> dict[GemmShape, GemmAlgorithm]:
    """The content of a file; empty if it is missing or damaged."""
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
    """Replace the file as a whole, safe against concurrent writers. A cache that cannot be written costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(sorted(tuning.items()), file)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("cannot keep measured products in %s: %s", path, error)
