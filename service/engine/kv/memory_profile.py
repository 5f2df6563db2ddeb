"""Size of the KV cache: the memory left after weights and workspace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.kv_cache import block_bytes, draft_bytes
from model.ops.interface import Ops
from service.config.settings import Settings
from service.engine.drafting.models import PlannedDraftModel
from service.errors import StartupError

CPU_CACHE_BYTES = 2 << 30

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Holds bytes, or "max"."""

RESERVED_GPU_BYTES = 256 << 20
"""Reserved for the driver, cuBLAS and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    num_blocks: int
    block_size: int
    block_bytes: int  # summed over ranks
    max_model_len: int
    num_ranks: int = 1


def plan_memory(
    settings: Settings,
    config: ModelConfig,
    ops: Ops,
    wanted_len: int,
    *,
    reserved_bytes: int = 0,
    draft: PlannedDraftModel | None = None,
) -> MemoryPlan:
    """Size the pool from one rank's free memory minus `reserved_bytes` and the draft model. Raises StartupError."""
    bytes_per_block = block_bytes(config, settings.block_size, ops.kv_dtype, ops.num_ranks)
    if draft is not None:
        bytes_per_block += draft_bytes(ops, draft.block_shape(settings.block_size))
        reserved_bytes += draft.num_bytes
    num_blocks = settings.num_gpu_blocks or _affordable_bytes(settings, ops, reserved_bytes) // bytes_per_block
    useful_blocks = settings.max_num_seqs * -(-wanted_len // settings.block_size)
    num_blocks = min(num_blocks, useful_blocks)
    held_len = num_blocks * settings.block_size
    free_bytes, total_bytes = ops.memory_bytes()
    each = "" if ops.num_ranks == 1 else " on each rank"
    left = f"{_gib(free_bytes - reserved_bytes)} of {_gib(total_bytes)} are left after the weights{each}"
    if num_blocks < 1:
        more = "free some, raise --gpu-memory-utilization" if ops.name == "cuda" else "free some"
        raise StartupError(f"no memory is left for the KV cache: {left}; {more} or take a smaller model")
    if num_blocks * bytes_per_block > free_bytes - reserved_bytes:
        raise StartupError(
            f"--num-gpu-blocks: {num_blocks} blocks take {_gib(num_blocks * bytes_per_block)}, and {left}"
        )
    if settings.max_model_len is not None and held_len < settings.max_model_len:
        raise StartupError(f"--max-model-len: the KV cache holds {held_len} tokens, fewer than the length asked for")
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        block_bytes=bytes_per_block * ops.num_ranks,
        max_model_len=min(wanted_len, held_len),
        num_ranks=ops.num_ranks,
    )


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / (1 << 30):.1f} GiB"


def host_memory_bytes() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _affordable_bytes(settings: Settings, ops: Ops, reserved_bytes: int) -> int:
    free, total = ops.memory_bytes()
    free -= reserved_bytes
    if ops.name == "cuda":
        return int(free - total * (1 - settings.gpu_memory_utilization)) - RESERVED_GPU_BYTES
    return min(free // 4, CPU_CACHE_BYTES // ops.num_ranks)
