"""Every kernel compiles, in every dtype and for every architecture of the README that a source distinguishes; no GPU
is needed for that."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from model.ops.gpu.adapters.product import product_build
from model.ops.gpu.attention.paged import decode_attention, plan_decode_attention, prefill_attention
from model.ops.gpu.attention.rotated_decode import can_rotate, rotate_and_decode
from model.ops.gpu.experts import builds as experts
from model.ops.gpu.int4.builds import GEMV_X_ROWS, Int4Layout, gemv_w4_build, small_m_w4_build
from model.ops.gpu.linear_builds import (
    GEMV_BUILDS,
    SMALL_M_SPLITS,
    exact_gemv_build,
    one_row_build,
    small_m_build,
)
from model.ops.gpu.w8.builds import GEMV_W8_BUILDS, few_rows_fp8_build, small_m_fp8_build, small_m_w8a16_build
from model.ops.interface import MAX_EXACT_ROWS, NO_WINDOW, AttentionBatch, HeadRotation
from tests.support.source_tree import ROOT

COMPILES_ALL = "QUIRE_COMPILE_ALL" in os.environ
BUILDS = (
    ("float32", "80"), ("float16", "80"), ("bfloat16", "80"), *((("bfloat16", "86"),) if COMPILES_ALL else ()),
    ("bfloat16", "89"), ("bfloat16", "90a"), ("bfloat16", "120"),
)  # fmt: skip
EVERY_VALUE = ("bfloat16", "90a")
"""Architecture for which each value of each define is compiled; for others the first build. A source that includes one
of FP8_HEADERS has other code for sm_80, with each value, and for sm_89, with the first and the last build.
QUIRE_COMPILE_ALL=1: all."""
FP8_HEADERS = {"fp8.cuh", "widen.cuh"}
"""Headers that distinguish sm_89, where fp8 units begin, from sm_80."""
SIZES = {"STAGES", "AHEAD", "SHARED_BYTES"}
"""Defines of which the least and the most are compiled: they count buffers and bytes."""
AS_LAUNCHED = ("bfloat16", "90a")
"""Architectures for which the first build of each kernel is optimised as in production. The other builds pass the same
front end, translation and assembler; QUIRE_COMPILE_ALL=1 optimises all."""
QUICK = "--Ofast-compile=max"
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
SHAPE = {"HEAD_DIM": 128, "BLOCK_SIZE": 16}
ALSO = {
    "lora_shrink": ({"ROW_TILES": 1}, {"ROW_TILES": 2}),
    "lora_expand": ({"ROW_TILES": 1}, {"ROW_TILES": 2}),
    "experts_lora": ({"PAIRS": 1, "OUT_FLOAT": 0}, {"PAIRS": 2, "OUT_FLOAT": 1}),
    "dequantise_rows": ({}, {"WEIGHT_INT8": 1, "BLOCK_SCALES": 0}, {"WEIGHT_INT8": 0, "BLOCK_SCALES": 1}),
    "route_experts": ({"PER_LANE": 1}, {"PER_LANE": 4}),
    "route_few": ({"PER_LANE": 1}, {"PER_LANE": 4}),
    "sum_add_rms_norm": ({"NUM_RANKS": 2, "PUSH": 0}, {"NUM_RANKS": 4, "PUSH": 1}),
    "sum_add_rms_norm_quantised": ({"NUM_RANKS": 4, "PUSH": 0}, {"NUM_RANKS": 2, "PUSH": 1}),
    "sum_ranks": ({"NUM_RANKS": 4, "STEPS": 2}, {"NUM_RANKS": 2, "STEPS": 1}, {"NUM_RANKS": 4, "STEPS": 0}),
    "gather_ranks": ({"NUM_RANKS": 4},),
    "normalise_qk_ranks": ({"NUM_RANKS": 4},),
    "best_of_ranks": ({"NUM_RANKS": 4},),
    "apply_penalties": ({}, {"IS_PART": 1}),
    "add_bias": ({"OUT_FLOAT": 0}, {"OUT_FLOAT": 1}),
    "rope_kv_write": tuple(
        {"HEAD_DIM": head_dim, **cache} for head_dim in (64, 80, 96, 128, 256) for cache in ({}, {"QUIRE_KV_FP8": 1})
    ),
}
LAYOUTS = (Int4Layout(1, False, True), Int4Layout(4, True, False))
RANKS = {path.stem for path in (ROOT / "cuda" / "group").glob("*.cu")} | {"sample_part"}
"""Kernels of a group, compiled where GPUs with links between them are."""
W8_KINDS = (
    {"X_FP8": 1, "WEIGHT_INT8": 0, "BLOCK_SCALES": 0},
    {"X_FP8": 0, "WEIGHT_INT8": 0, "BLOCK_SCALES": 1},
    {"X_FP8": 0, "WEIGHT_INT8": 1, "BLOCK_SCALES": 0},
)
H200 = 132, 227 << 10
ONE_ROW = {"HIDDEN": 2048, "INNER": 768, "NUM_USED": 8, "NUM_EXPERTS": 128, "BLOCKS": 132, "STAGES": 3}
"""Builds for Qwen3-30B-A3B on an H200."""
NAMES = sorted(path.stem for path in (ROOT / "cuda").glob("*/*.cu"))


def builds_of(name: str, dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """The sets of defines that this kernel is built with for Llama-3.1-8B's heads; none where it is never launched."""
    if name == "gemv":
        return gemv_builds(dtype_code)
    if name == "add_norm_gemv":
        return [] if dtype_code == 0 else [one_row_gemv(dtype_code, k) for k in (2048, 4096)]
    if name == "sample_tokens":
        shares = (1, 8) if architecture == "90a" else (1,)
        return [{"QUIRE_DTYPE": dtype_code, "SHARES": count} for count in shares]
    if name == "small_m_sm90":
        return small_m_builds(dtype_code, architecture)
    if name == "adapted_product_sm90":
        return adapter_builds(dtype_code, architecture)
    if name == "gemv_w8":
        return gemv_w8_builds(dtype_code)
    if name == "small_m_fp8_sm90":
        return small_m_fp8_builds(dtype_code, architecture)
    if name == "few_rows_fp8_sm90":
        return few_rows_fp8_builds(dtype_code, architecture)
    if name == "small_m_w8a16_sm90":
        return small_m_w8a16_builds(dtype_code, architecture)
    if name == "silu_mul_quantised_sm90" and (dtype_code, architecture) != (DTYPE_CODES["bfloat16"], "90a"):
        return []
    if name.startswith("experts_") and name not in ALSO:
        return expert_builds(name, dtype_code, architecture)
    if name == "gemv_w4a16":
        return gemv_w4_builds(dtype_code)
    if name == "small_m_w4a16_sm90":
        return small_m_w4_builds(dtype_code, architecture)
    if name in RANKS and (dtype_code, architecture) not in ((0, "80"), (2, "90a")) and not COMPILES_ALL:
        return []
    if name == "unpack_int4":
        return [{"QUIRE_DTYPE": dtype_code, **layout.defines} for layout in LAYOUTS]
    if not name.startswith(("plan_", "paged_", "rope_paged_")):
        return [{"QUIRE_DTYPE": dtype_code, **SHAPE, **more} for more in ALSO.get(name, ({},))]
    builds = attention_builds(dtype_code, architecture, np.float32) + attention_builds(
        dtype_code, architecture, np.uint8
    )
    return [defines for asked, defines in builds if asked == name]


def attention_builds(dtype_code: int, architecture: str, kv_dtype: type) -> list[tuple[str, dict[str, int]]]:
    """(kernel, defines) of decodes and prefills with Llama-3.1-8B's heads; uint8 is a cache in e4m3."""
    builds = []

    def get(asked, *, shared_bytes, **defines):
        builds.append((asked, defines))
        return lambda *launch: None

    def launch(asked, grid, args, *, threads, shared_bytes=0, overlaps=False, shared_percent=0, cluster=1, **defines):
        builds.append((asked, {"QUIRE_DTYPE": dtype_code, **defines}))

    ops = SimpleNamespace(
        launch=launch,
        most_clusters=lambda *_, **build: 132,
        arch=architecture,
        dtype_code=dtype_code,
        kernels=SimpleNamespace(get=get),
        num_sms=132,
        stream=None,
        temporary=np.empty,
        zeros=np.zeros,
        dtype=np.dtype(np.float16),
        max_shared_bytes=(99 << 10) if architecture in ("86", "89", "120") else 163 << 10,
        tensor_maps=SimpleNamespace(get=lambda *_: None),
    )
    q, kv = np.empty((2048, 32, 128), np.float32), np.empty((1, 1, 2, 8, 16, 128), kv_dtype)
    ints = np.zeros(97, np.int32)
    tables = np.zeros((96, 64), np.int32)
    decode_attention(ops, q[:96], AttentionBatch(kv, 0, tables, ints[:96], 0.1), q[:96])
    exact = AttentionBatch(kv, 0, tables[:8], ints[:8], 0.1, exact=True)
    plan_decode_attention(ops, 32, exact)
    decode_attention(ops, q[:8], exact, q[:8])
    drafted = AttentionBatch(kv, 0, tables, ints[:96], 0.1, drafted=True)
    plan_decode_attention(ops, 32, drafted)
    decode_attention(ops, q[:96], replace(drafted, plan=ints), q[:96])
    qkv, few = np.empty((8, 48 * 128), np.float32), AttentionBatch(kv, 0, tables[:8], ints[:8], 0.1)
    rotation = HeadRotation(np.empty((64, 64), np.float32), np.empty((64, 64), np.float32))
    alone = AttentionBatch(kv, 0, tables[:1], ints[:1], 0.1)
    for rows, batch in ((8, few), (1, alone)):
        if can_rotate(ops, qkv[:rows], batch):
            rotate_and_decode(ops, qkv[:rows], rotation, (ints[:rows], ints[:rows]), batch)
    for num_tokens, longest in ((96, 1), (96, 96), (2048, 96)):
        rows = q[:num_tokens]
        prefill_attention(ops, rows, AttentionBatch(kv, 0, tables, ints[:96], 0.1, NO_WINDOW, ints, longest), rows)
    return builds


def gemv_builds(dtype_code: int) -> list[dict[str, int]]:
    """All of them, in each type of result; there is none for float32."""
    if dtype_code == DTYPE_CODES["float32"]:
        return []
    shapes = (6144, 4096), (4096, 14336), (28672, 4096)
    few = [exact_gemv_build(0, rows, shape, *H200) for shape in shapes for rows in (5, 9)]
    exact = [exact_gemv_build(index, MAX_EXACT_ROWS, (6144, 4096), *H200) for index in range(len(GEMV_BUILDS))]
    builds = [
        {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": out_float, **build.defines}
        for build in (*GEMV_BUILDS, *few, *exact)
        for out_float in (0, 1)
    ]
    gated = [{"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": 0, "GATED_ROWS": 1, **build.defines} for build in few[-2:]]
    return [*builds, *(one_row_gemv(dtype_code, k) for k in (2048, 4096)), *gated]


def one_row_gemv(dtype_code: int, k: int) -> dict[str, int]:
    return {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": 0, **one_row_build(GEMV_BUILDS[0], k).defines}


def small_m_builds(dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """Return the builds of Llama-3.1-8B on an H200; none for other architectures or float32."""
    if architecture != "90a" or dtype_code == DTYPE_CODES["float32"]:
        return []
    asked = [(split, m, n) for split in SMALL_M_SPLITS for m in (32, 64, 96, 128) for n in (4096, 6144, 28672, 128256)]
    found = {small_m_build(split, m, n, 132, 227 << 10) for split, m, n in asked} - {None}
    return [
        {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": out_float, **build.defines}
        for build in sorted(found)
        for out_float in (0, 1)
    ]


def adapter_builds(dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """Return the builds of Llama-3.1-8B on an H200; none for other architectures or float32."""
    if architecture != "90a" or dtype_code == DTYPE_CODES["float32"]:
        return []
    products = (4096, 1), (6144, 3), (28672, 2)
    asked = [(m, *product, rank) for m in (32, 64, 96) for product in products for rank in (16, 64)]
    found = {product_build(*sizes, *H200) for sizes in asked}
    found |= {product_build(64, *product, 16, *H200, is_fp8=True) for product in products}
    found.add(product_build(96, 4096, 1, 64, *H200, is_fp8=True))
    return [{"QUIRE_DTYPE": dtype_code, **build.defines} for build in found - {None}]


def gemv_w8_builds(dtype_code: int) -> list[dict[str, int]]:
    """All of them, with each kind of x and weights; there is none for float32."""
    return [
        {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": build.col_tiles - 1, **kind, **build.defines}
        for build in GEMV_W8_BUILDS
        for kind in W8_KINDS
        if dtype_code != DTYPE_CODES["float32"]
    ]


def small_m_fp8_builds(dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """Return the builds of Llama-3.1-8B on an H200; none for other architectures or float32."""
    if architecture != "90a" or dtype_code == DTYPE_CODES["float32"]:
        return []
    asked = [(m, n) for m in (16, 32, 64, 96, 128, 192, 256) for n in (4096, 6144, 28672)]
    found = {small_m_fp8_build(m, n, 132, 227 << 10) for m, n in asked}
    return [{"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": int(build.cols == 64), **build.defines} for build in found]


def few_rows_fp8_builds(dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """Return the builds of Llama-3.1-8B on an H200; none for other architectures or float32."""
    if architecture != "90a" or dtype_code == DTYPE_CODES["float32"]:
        return []
    kinds = (6144, 4096, {}), (28672, 4096, {"GATED": 1}), (4096, 14336, {"ROUNDS_X": 1})
    return [
        {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": 0, **build.defines, **kind}
        for m in (1, 2)
        for n, k, kind in kinds
        if (build := few_rows_fp8_build(m, n, k, *H200, is_gated="GATED" in kind)) is not None
    ]


def small_m_w8a16_builds(dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """Return the builds of Llama-3.1-8B on an H200; none for other architectures or float32."""
    if architecture != "90a" or dtype_code == DTYPE_CODES["float32"]:
        return []
    asked = [(m, n) for m in (32, 64, 96, 128, 192) for n in (4096, 28672)]
    return [
        {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": int(m == 64), **kind, **small_m_w8a16_build(m, n, *H200).defines}
        for m, n in asked
        for kind in ({"WEIGHT_INT8": m % 64 // 32, "BLOCK_SCALES": 0}, {"WEIGHT_INT8": 0, "BLOCK_SCALES": 1})
    ]


def expert_builds(name: str, dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """The builds for few and many rows of each kind; there is none for float32, and `experts_sm90` for Hopper only."""
    if dtype_code == DTYPE_CODES["float32"] or (name.endswith("_sm90") and architecture != "90a"):
        return []
    common = {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": 0}
    if name == "experts_w4a16_sm90":
        asked_w4 = [(16, LAYOUTS[0]), (64, LAYOUTS[1]), (512, LAYOUTS[0])]
        builds_w4 = [experts.w4_sm90_build(mean, layout, 227 << 10) for mean, layout in asked_w4]
        return [{**common, **build.defines} for build in builds_w4 if build is not None]
    if name == "experts_sm90":
        asked = [(16, False), (512, False), (512, True)]
        found = [(experts.sm90_build(mean, is_fp8, 227 << 10), is_fp8) for mean, is_fp8 in asked]
        return [{**common, "X_FP8": int(is_fp8), **build.defines} for build, is_fp8 in found if build is not None]
    sizes = ((1, 1 / 16), (64, 8))
    if name == "experts_gemv_w4a16":
        few = zip(sizes, LAYOUTS, strict=True)
        return [{"QUIRE_DTYPE": dtype_code, **experts.gemv_w4_build(*size).defines(layout)} for size, layout in few]
    if name == "experts_row":
        return [{"QUIRE_DTYPE": dtype_code, **ONE_ROW}] if architecture == "90a" else []
    if name == "experts_gemv":
        kinds = ({"GATED": 1, "KNOWN": 0}, {"GATED": 0, "KNOWN": 0}, {"GATED": 0, "KNOWN": 1})
        few = zip(kinds, (*sizes, sizes[0]), strict=True)
        return [{**common, **kind, **experts.gemv_build(*size).defines} for kind, size in few]
    asked = zip(W8_KINDS, (*sizes, sizes[0]), strict=True)
    return [{**common, "GATED": 0, "KNOWN": 0, **kind, **experts.gemv_w8_build(*size).defines} for kind, size in asked]


def gemv_w4_builds(dtype_code: int) -> list[dict[str, int]]:
    """Every build, for two kinds of weights; there is none for float32."""
    if dtype_code == DTYPE_CODES["float32"]:
        return []
    asked = [(m, n, LAYOUTS[m == 4]) for m in GEMV_X_ROWS for n in (4096, 6144)]
    gated = {"OUT_FLOAT": 0, "GATED": 1, **gemv_w4_build(1, 28672, 4096, LAYOUTS[0], *H200, 2).defines(LAYOUTS[0])}
    first = [{"QUIRE_DTYPE": dtype_code, **gated}, {"QUIRE_DTYPE": dtype_code, **gated, "NORMED": 1}]
    return first + [
        {"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": m % 2, **gemv_w4_build(m, n, 4096, layout, *H200).defines(layout)}
        for m, n, layout in asked
    ]


def small_m_w4_builds(dtype_code: int, architecture: str) -> list[dict[str, int]]:
    """The builds of Llama-3.1-8B on an H200; other architectures have none, nor has float32."""
    if architecture != "90a" or dtype_code == DTYPE_CODES["float32"]:
        return []
    asked = [(m, *shape) for m in (32, 64, 96, 128, 192, 256) for shape in ((6144, 4096), (28672, 4096), (4096, 14336))]
    found = {small_m_w4_build(*sizes, LAYOUTS[0], 132, 227 << 10) for sizes in asked}
    found.add(small_m_w4_build(64, 4096, 4096, LAYOUTS[1], 132, 227 << 10))
    return [{"QUIRE_DTYPE": dtype_code, "OUT_FLOAT": int(build.cols == 64), **build.defines} for build in found]


def with_each_value(builds: list[dict[str, int]]) -> list[dict[str, int]]:
    """Take the first build, then the build with the most new values of defines, until none has any."""
    kept = builds[:1]
    values = {value for defines in builds for value in defines.items()}
    bounds = {
        (name, bound([value for other, value in values if other == name]))
        for name in SIZES & {name for name, _ in values}
        for bound in (min, max)
    }
    new = {value for value in values if value[0] not in SIZES or value in bounds}.difference(
        *(first.items() for first in kept)
    )
    while new:
        kept.append(max(builds, key=lambda defines: len(defines.items() & new)))
        new -= kept[-1].items()
    return kept


def few_of(builds: list[dict[str, int]], dtype: str, architecture: str, *, knows_fp8: bool) -> list[dict[str, int]]:
    """Drop builds that differ from others by no code of ours."""
    if (dtype, architecture) == EVERY_VALUE or (knows_fp8 and (dtype, architecture) == ("bfloat16", "80")):
        return with_each_value(builds)
    if architecture == "89":
        return builds[:1] + builds[1:][-1:] if knows_fp8 else []
    return builds[:1]


@functools.cache
def included_by(path: Path) -> frozenset[str]:
    """Names of the headers of `cuda/` that this source includes, directly or not."""
    headers = [ROOT / "cuda" / header for header in re.findall(r'#include "(.+)"', path.read_text())]
    return frozenset(header.name for header in headers).union(*map(included_by, headers))


def knows_fp8(name: str) -> bool:
    (path,) = (ROOT / "cuda").glob(f"*/{name}.cu")
    return not FP8_HEADERS.isdisjoint(included_by(path))


@pytest.mark.parametrize(("dtype", "architecture"), BUILDS)
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles(name, dtype, architecture):
    reason = "no compiler: needs the packages of the compile extra"
    kernels = pytest.importorskip("model.ops.gpu.kernels", reason=reason, exc_type=ImportError)
    builds = builds_of(name, DTYPE_CODES[dtype], architecture)
    if not COMPILES_ALL:
        builds = few_of(builds, dtype, architecture, knows_fp8=knows_fp8(name))
    for number, defines in enumerate(builds):
        is_whole = COMPILES_ALL or (number == 0 and (dtype, architecture) == AS_LAUNCHED)
        options = () if is_whole else (QUICK,)
        assert kernels.compile_cubin(name, architecture, defines, *options).startswith(b"\x7fELF")


def test_sources_distinguish_architectures_in_few_places():
    """Otherwise sm_86, and sm_89 of every kernel, have to be compiled without QUIRE_COMPILE_ALL too."""
    sources = {path.name: path.read_text() for path in (ROOT / "cuda").rglob("*.cu*")}
    limits = {name: set(re.findall(r"__CUDA_ARCH__ *(.*)", source)) for name, source in sources.items()}
    assert set().union(*limits.values()) == {">= 890", ">= 900"}
    assert {name for name, own in limits.items() if ">= 890" in own} == FP8_HEADERS


def test_a_mistake_is_reported_with_its_line():
    reason = "no compiler: needs the packages of the compile extra"
    kernels = pytest.importorskip("model.ops.gpu.kernels", reason=reason, exc_type=ImportError)
    with pytest.raises(kernels.KernelError, match=r"types\.cuh\(\d+\).*QUIRE_DTYPE is 0, 1 or 2"):
        kernels.compile_cubin("rms_norm", "80", {"QUIRE_DTYPE": 7})
