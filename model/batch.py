"""The forward pass's only input: which tokens of which sequences are computed in one step."""

from __future__ import annotations

from dataclasses import dataclass

from model.ops.interface import Array


@dataclass(frozen=True)
class Batch:
    """One step, flattened over its sequences. Sequences with a single token come first: `num_decodes` of them.

    There is no prefill flag: a sequence contributes however many tokens it still lacks, one or many. The decode kernel
    serves the leading single-token rows, the prefill kernel the rest.
    """

    token_ids: Array  # int32[T]
    positions: Array  # int32[T]
    slots: Array  # int64[T], block id * block_size + offset
    block_tables: Array  # int32[S, max_blocks], rows padded with 0
    context_lens: Array  # int32[S], tokens in the cache once this step has written its own
    query_start: Array  # int32[S - num_decodes + 1], rows of T where the sequences after the decodes begin and end
    logit_rows: Array | None  # int32[R], the rows of T whose logits are wanted; None: all of them
    num_decodes: int
    num_tokens: int
    num_sequences: int
    max_query_len: int  # of the sequences after the decodes
