"""Steps of chunks in a small cache, and the same sequences computed one by one."""

from __future__ import annotations

import numpy as np

from model.adapter_slots import AdapterSlots, BatchAdapters
from model.batch import Batch
from model.families.llama import Llama
from model.ops.interface import Array
from model.step_inputs import ForwardInputs

BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS = 8, 24, 12


def step(model: Llama, chunks: list[tuple[int, int]]) -> ForwardInputs:
    """Build a step of chunks (start, length), one-token chunks first, with logits of each chunk's last row."""
    starts, lengths = np.array(chunks, np.int32).T
    ends, rng = np.cumsum(lengths), np.random.default_rng(len(chunks))
    positions = np.concatenate([np.arange(start, start + length) for start, length in chunks]).astype(np.int32)
    tables = rng.permutation(MAX_ROWS * MAX_BLOCKS)[: len(chunks) * MAX_BLOCKS].reshape(len(chunks), -1)
    tables = tables[:, : -(-int((starts + lengths).max()) // BLOCK_SIZE)].astype(np.int32)
    blocks = tables[np.repeat(np.arange(len(chunks)), lengths), positions // BLOCK_SIZE].astype(np.int64)
    num_decodes = int(np.count_nonzero(lengths == 1))
    return ForwardInputs(
        token_ids=rng.integers(0, model.config.vocab_size, ends[-1]).astype(np.int32),
        pending_token_row=np.full(ends[-1], MAX_ROWS, np.int32),
        positions=positions,
        slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        context_lens=starts + lengths,
        logit_rows=(ends - 1).astype(np.int32),
        num_decodes=num_decodes,
        tables=tables[:num_decodes],
        dirty_tables=np.ones(num_decodes, np.bool_),
        chunk_lens=lengths[num_decodes:],
        chunk_tables=list(tables[num_decodes:]),
    )


def by_itself(
    model: Llama, kv: Array, inputs: ForwardInputs, *, every_row: bool = False, adapters: AdapterSlots | None = None
) -> np.ndarray:
    """Return logits of each sequence's last row, or of every row, sequence after sequence, by the adapters in
    `adapters` that the step names."""
    ops, rows, end = model.ops, [], 0
    tables = inputs.block_tables(np.arange(inputs.num_decodes), BLOCK_SIZE)
    for sequence, length in enumerate([*[1] * inputs.num_decodes, *inputs.chunk_lens]):
        part, end = slice(end, end + length), end + length
        batch = Batch(
            token_ids=ops.upload(inputs.token_ids[part]),
            positions=ops.upload(inputs.positions[part]),
            slots=ops.upload(inputs.slots[part]),
            block_tables=ops.upload(tables[[sequence]]),
            context_lens=ops.upload(inputs.context_lens[[sequence]]),
            query_start=ops.upload(np.array([0, length], np.int32)),
            logit_rows=None if every_row else ops.upload(np.array([length - 1], np.int32)),
            num_decodes=0,
            num_tokens=length,
            num_sequences=1,
            max_query_len=length,
            adapters=None if adapters is None else _adapted(adapters, inputs.adapter_slots[part]),
        )
        with ops.scratch():
            rows.append(ops.download(model.forward(batch, kv)))
    return np.concatenate(rows)


def _adapted(slots: AdapterSlots, rows: np.ndarray) -> BatchAdapters:
    tile_rows = slots.adapter_ops.lora_tile_rows(len(rows))
    return slots.batch(slots.ops.upload_all(slots.host_rows(rows, tile_rows)), tile_rows)
