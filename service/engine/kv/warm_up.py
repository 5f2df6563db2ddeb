"""Warm-up steps on a GPU: compile and load kernels and allocate workspace before serving."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from model.adapter_slots import AdapterSlots, BatchAdapters
from model.batch import Batch
from model.cuda_graphs import CHUNK_ROWS, StepGraphs
from model.families.llama import Llama
from model.kv_cache import allocate
from model.ops.interface import Ops, SamplingArrays, TokenMask
from model.sampler import SampledRows, SeenTokens, sampling_arrays, sampling_record
from model.sampling_params import MAX_LOGPROBS, SamplingParams
from model.text.grammar_matcher import num_mask_words

SMALL_BATCHES = (16, 32, 64, 96, 128, 192, 256)
"""Decode batch sizes with their own kernels on some devices."""


@dataclass(frozen=True, kw_only=True)
class WarmUpSizes:
    block_size: int
    num_tokens: int  # of the largest step
    num_sequences: int  # decode rows of the largest step
    max_model_len: int
    verifies_drafts: bool = False


def run_all_kernels(model: Llama, sizes: WarmUpSizes, adapters: AdapterSlots | None = None) -> None:
    """Run everything an engine runs at start on a GPU, for `Ops.compile_ahead`."""
    ops, max_rows = model.ops, sizes.num_sequences
    max_blocks = -(-sizes.max_model_len // sizes.block_size)
    sampled = ops.empty((max_rows,), np.dtype(np.int32))
    graphs = StepGraphs(model, sampled, max_rows, max_blocks, verifies_drafts=sizes.verifies_drafts)
    kv = allocate(ops, model.config, 1, sizes.block_size)
    with ops.scratch():  # first: sampling is needed first and compiles slowly
        logits = model.forward(shared_block_batch(ops, np.ones(1, np.int64), sizes.block_size, 1), kv)
        ops.sample(logits, _sampling(model, SamplingParams(max_tokens=1, temperature=0.0), 1))
    graphs.run_sizes(kv, adapters)
    warm_up(model, sizes, adapters)
    warm_up_products(model, sizes)


def warm_up(model: Llama, sizes: WarmUpSizes, adapters: AdapterSlots | None = None) -> None:
    """Run the largest prefill and decode, and small batches, with all sampling options and adapters: workspace is
    allocated before the pool is sized."""
    ops = model.ops
    block_size, num_sequences, max_model_len = sizes.block_size, sizes.num_sequences, sizes.max_model_len
    num_tokens = min(sizes.num_tokens, max_model_len)
    kv = allocate(ops, model.config, 1, block_size)
    params = SamplingParams(max_tokens=1, top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    steps = [np.array([num_tokens]), np.ones(num_sequences, np.int64), np.array([min(2, num_tokens)])]
    steps += [np.ones(count, np.int64) for count in SMALL_BATCHES if count < num_sequences]
    for lengths in steps:
        count = len(lengths)
        with ops.scratch():
            batch = shared_block_batch(ops, lengths, block_size, max_model_len)
            logits = model.forward(replace(batch, adapters=_first_adapter(adapters, batch)), kv)
            logits = ops.gather_rows(logits, ops.upload(np.zeros(count, np.int32)))  # for forked branches
            ops.sample(logits, _sampling(model, params, count))
        ops.synchronize()
    ops.copy_blocks(kv, *ops.upload_all([np.zeros(1, np.int32), np.ones(1, np.int32)]))  # outside the cache


def _sampling(model: Llama, params: SamplingParams, count: int) -> SamplingArrays:
    vocab_size = model.config.vocab_size
    mask = np.zeros((1, num_mask_words(vocab_size)), np.uint32)
    rows = SampledRows(
        records=[sampling_record(params, 0, params.logprobs)] * count,
        positions=np.ones(count, np.uint32),
        sampling=[params] * count,
        seen=[SeenTokens((0,), 1)] * count,
        num_prompt_tokens=[1] * count,
        mask=TokenMask(np.full(count, -1, np.int32), mask) if params.logprobs else None,
    )
    return sampling_arrays(rows, vocab_size, frozenset(), model.ops.upload_all)


def _first_adapter(slots: AdapterSlots | None, batch: Batch) -> BatchAdapters | None:
    """Use the first slot's adapter for all rows."""
    if slots is None:
        return None
    tile_rows = slots.adapter_ops.lora_tile_rows(batch.num_tokens)
    return slots.batch(
        slots.ops.upload_all(slots.host_rows(np.zeros(batch.num_tokens, np.int32), tile_rows)), tile_rows
    )


def warm_up_products(model: Llama, sizes: WarmUpSizes) -> None:
    """Run every other GEMM size once, in one layer: loading a kernel later delays its step by 5 to 70 ms. Smaller steps
    load at capture; the LM head only runs in padded sizes (`padded_rows`)."""
    ops, max_model_len = model.ops, sizes.max_model_len
    kv, first_layer = allocate(ops, model.config, 1, sizes.block_size), model.first_layer()
    for size in ops.linear_sizes(sizes.num_tokens):
        if size > CHUNK_ROWS[-1]:
            count = min(size, sizes.num_tokens)
            lengths = np.diff([*range(0, count, max_model_len), count])[::-1]  # shortest first
            with ops.scratch():
                first_layer.forward(shared_block_batch(ops, lengths, sizes.block_size, max_model_len), kv)
    with ops.scratch():
        head_sizes = ops.linear_sizes(sizes.num_sequences)
        hidden = ops.gather_rows(model.weights.embedding, ops.upload(np.zeros(max(head_sizes, default=0), np.int32)))
        for size in head_sizes:
            with ops.scratch():
                model.logits(hidden[:size], None)
    ops.synchronize()


def shared_block_batch(ops: Ops, lengths: np.ndarray, block_size: int, max_model_len: int) -> Batch:
    """Build a step with these lengths (ones first) in which all sequences use block 0."""
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
