"""Size of the KV cache: memory left by weights and workspace."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.adapter_slots import AdapterSlots, BatchAdapters, adapter_rows
from model.batch import Batch
from model.config import ModelConfig
from model.cuda_graphs import ROWS_BESIDE
from model.families.llama import Llama
from model.kv_cache import allocate, block_bytes, draft_bytes
from model.ops.interface import Ops, TokenMask
from model.sampler import SampledRows, SeenTokens, sampling_arrays, sampling_record
from model.sampling_params import MAX_LOGPROBS, SamplingParams
from model.text.grammar_matcher import num_mask_words
from service.config.settings import Settings
from service.engine.drafting.models import PlannedDraftModel
from service.errors import StartupError

CPU_CACHE_BYTES = 2 << 30

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Bytes, or "max"."""

RESERVED_GPU_BYTES = 256 << 20
"""Reserve for the driver, cuBLAS and fragmentation."""

SMALL_BATCHES = (16, 32, 64, 96, 128, 192, 256)
"""Decode batches with their own kernels on some devices."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    num_blocks: int
    block_size: int
    block_bytes: int  # of all ranks
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
    """Size the pool from a rank's free memory less `reserved_bytes` and the draft model. Raises StartupError."""
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
    left = f"{_gib(free_bytes - reserved_bytes)} of {_gib(total_bytes)} are left beside the weights{each}"
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


def warm_up(
    model: Llama,
    block_size: int,
    num_tokens: int,
    num_sequences: int,
    max_model_len: int,
    adapters: AdapterSlots | None = None,
) -> None:
    """Run the largest prefill and decode, and small batches, with every sampling option and adapters: workspace is
    allocated before the pool is sized."""
    ops, vocab_size = model.ops, model.config.vocab_size
    kv = allocate(ops, model.config, 1, block_size)
    params = SamplingParams(max_tokens=1, top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    steps = [np.array([num_tokens]), np.ones(num_sequences, np.int64), np.array([min(2, num_tokens)])]
    steps += [np.ones(count, np.int64) for count in SMALL_BATCHES if count < num_sequences]
    for lengths in steps:
        count = len(lengths)
        rows = SampledRows(
            records=[sampling_record(params, 0, MAX_LOGPROBS)] * count,
            positions=np.ones(count, np.uint32),
            sampling=[params] * count,
            seen=[SeenTokens((0,), 1)] * count,
            num_prompt_tokens=[1] * count,
            mask=TokenMask(np.full(count, -1, np.int32), np.zeros((1, num_mask_words(vocab_size)), np.uint32)),
        )
        with ops.scratch():
            batch = shared_block_batch(ops, lengths, block_size, max_model_len)
            logits = model.forward(replace(batch, adapters=_first_adapter(adapters, batch)), kv)
            logits = ops.gather_rows(logits, ops.upload(np.zeros(count, np.int32)))  # for forking branches
            ops.sample(logits, sampling_arrays(rows, vocab_size, frozenset(), ops.upload_all))
        ops.synchronize()
    ops.copy_blocks(kv, *ops.upload_all([np.zeros(1, np.int32), np.ones(1, np.int32)]))  # outside the cache


def _first_adapter(slots: AdapterSlots | None, batch: Batch) -> BatchAdapters | None:
    """Return the first slot's adapter for all rows."""
    if slots is None:
        return None
    tile_rows = slots.adapter_ops.lora_tile_rows(batch.num_tokens)
    return BatchAdapters(slots, adapter_rows(np.zeros(batch.num_tokens, np.int32), slots.ops, tile_rows))


def warm_up_sizes(model: Llama, block_size: int, num_tokens: int, num_sequences: int, max_model_len: int) -> None:
    """Run every other GEMM size once, in one layer: loading a kernel later delays its step by 5 to 70 ms. Smaller
    steps load at capture; the LM head runs in padded sizes only (`padded_rows`)."""
    ops = model.ops
    kv, first_layer = allocate(ops, model.config, 1, block_size), model.first_layer()
    for size in ops.linear_sizes(num_tokens):
        if size > ROWS_BESIDE[-1]:
            count = min(size, num_tokens)
            lengths = np.diff([*range(0, count, max_model_len), count])[::-1]  # shortest first
            with ops.scratch():
                first_layer.forward(shared_block_batch(ops, lengths, block_size, max_model_len), kv)
    with ops.scratch():
        sizes = ops.linear_sizes(num_sequences)
        hidden = ops.gather_rows(model.weights.embedding, ops.upload(np.zeros(max(sizes, default=0), np.int32)))
        for size in sizes:
            with ops.scratch():
                model.logits(hidden[:size], None)
    ops.synchronize()


def shared_block_batch(ops: Ops, lengths: np.ndarray, block_size: int, max_model_len: int) -> Batch:
    """Build a step of these lengths (ones first) that all use block 0."""
    ends = np.cumsum(lengths)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    num_decodes = int(np.count_nonzero(lengths == 1))
    return Batch(
        token_ids=ops.upload(np.zeros(ends[-1], np.int32)),
        positions=ops.upload(positions),
        slots=ops.upload((positions % block_size).astype(np.int64)),
        block_tables=ops.upload(np.zeros((len(lengths), -(-max_model_len // block_size)), np.int32)),
        context_lens=ops.upload(lengths.astype(np.int32)),
        query_start=ops.upload(np.concatenate([[num_decodes], ends[num_decodes:]]).astype(np.int32)),
        logit_rows=ops.upload((ends - 1).astype(np.int32)),
        num_decodes=num_decodes,
        num_tokens=int(ends[-1]),
        num_sequences=len(lengths),
        max_query_len=int(lengths[num_decodes:].max(initial=0)),
    )
