"""Input of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from model.adapter_slots import BatchAdapters
from model.ops.interface import Array


@dataclass(frozen=True)
class Batch:
    """One step, flattened over its sequences; the `num_decodes` sequences with a single token come first.

    The decode kernel processes these, the prefill kernel the others; there is no prefill flag.
    """

    token_ids: Array  # int32[T]
    positions: Array  # int32[T], rows of RopeTables
    slots: Array  # int64[T], block id * block_size + offset
    block_tables: Array  # int32[S, max_blocks], rows padded with 0
    context_lens: Array  # int32[S], tokens in the cache, including this step's
    query_start: Array  # int32[S - num_decodes + 1], rows where the later sequences begin and end
    logit_rows: Array | None  # int32[R], rows with logits; None: all
    num_decodes: int
    num_tokens: int
    num_sequences: int
    max_query_len: int  # of the later sequences
    adapters: BatchAdapters | None = None  # None: every row is the base model's
    has_drafts: bool = True  # rows may be tokens of one sequence; False: each decode is a different one
    is_drafted: bool = False  # adjacent decodes are a token and its drafts


@dataclass(frozen=True)
class StateRows:
    """Rows of a step, padding included, for a draft head that reads the model's states."""

    token_ids: Array  # int32[T]
    positions: Array  # int32[T]
    slots: Array  # int64[T]; padding: outside the cache
    states: Array  # [T, n * H], the inputs of n layers
