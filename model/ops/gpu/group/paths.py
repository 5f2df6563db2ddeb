"""Paths of a sum and their limits. All paths give the same bits."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from model.ops.gpu.group.shared import MAX_PUSH_ROWS, PUSH_ROW_BYTES

_VEC_BYTES = 16


class SumPath(Enum):
    PUSH = "push"  # rows are written to every peer
    PULL = "pull"  # every rank reads its peers' parts
    TWO_SHOT = "two-shot"  # every rank sums a share and reads the others'
    NCCL = "nccl"  # NCCL moves the shares


UNLIMITED = 1 << 60


class PathLimits(NamedTuple):
    """Most bytes of a part for each path."""

    push: int
    pull: int
    two_shot: int  # NCCL beyond, if available


LIMITS = {
    2: PathLimits(push=128 << 10, pull=UNLIMITED, two_shot=UNLIMITED),
    4: PathLimits(push=32 << 10, pull=512 << 10, two_shot=16 << 20),
    8: PathLimits(push=16 << 10, pull=256 << 10, two_shot=16 << 20),
}
"""Limits by number of ranks. Two ranks: `python -m tests.bench.sums --ranks 2` on H200s; PULL is fastest up to the
largest sum measured, 64 MiB, and moves as little as any path. The others are not measured yet."""


def uses_nccl(num_ranks: int) -> bool:
    return LIMITS[num_ranks].two_shot < UNLIMITED


def fits_push(num_rows: int, row_bytes: int) -> bool:
    return num_rows <= MAX_PUSH_ROWS and row_bytes <= PUSH_ROW_BYTES and row_bytes % _VEC_BYTES == 0


def path_of(num_ranks: int, num_rows: int, row_bytes: int, *, has_nccl: bool) -> SumPath:
    """Return the path of a sum of [num_rows, row_bytes]; PUSH and PULL are fused with the norm after it."""
    limits, num_bytes = LIMITS[num_ranks], num_rows * row_bytes
    if num_bytes <= limits.push and fits_push(num_rows, row_bytes):
        return SumPath.PUSH
    if num_bytes <= limits.pull:
        return SumPath.PULL
    return SumPath.NCCL if has_nccl and num_bytes > limits.two_shot else SumPath.TWO_SHOT
