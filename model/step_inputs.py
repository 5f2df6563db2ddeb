"""Inputs of a step as plain arrays: everything that the engine sends to the ranks that run the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from model.ops.interface import SamplingArrays

NO_PENDING_ROW = -1
"""Marks a known token id."""


def no_blocks() -> np.ndarray:
    return np.zeros((0, 2), np.int32)


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """Forward pass over T tokens of S sequences; see model.batch.Batch.

    Decodes come first, in rows that mostly persist between steps; C longer chunks follow.
    """

    token_ids: np.ndarray  # int32[T]
    pending_token_row: np.ndarray  # int32[T], row of the previous step's sampled token; out of range: token_ids applies
    positions: np.ndarray  # int32[T], rows of RopeTables
    slots: np.ndarray  # int64[T]
    context_lens: np.ndarray  # int32[S]
    logit_rows: np.ndarray  # int32[R]
    num_decodes: int
    tables: np.ndarray  # int32[num_decodes, max_blocks]; undefined beyond a row's blocks
    dirty_tables: np.ndarray  # bool[num_decodes], rows of `tables` changed since they were sent
    chunk_lens: np.ndarray  # int32[C]
    chunk_tables: Sequence[np.ndarray]  # C of int32[any]
    num_draft_rows: int = 0  # last decodes: tokens of a sequence and its drafts, adjacent, with a table each
    adapter_slots: np.ndarray | None = None  # int32[T], slot of each row's adapter, NO_SLOT: none; None: no row has one

    @property
    def query_start(self) -> np.ndarray:
        """Return int32[C + 1]; see model.batch.Batch."""
        return np.cumsum([self.num_decodes, *self.chunk_lens], dtype=np.int32)

    def block_tables(self, rows: np.ndarray, block_size: int) -> np.ndarray:
        """Return int32[N + C, w]: N `rows` of `tables`, then the chunks', as wide as their contexts."""
        widths = [-(-int(self.context_lens[rows].max(initial=0)) // block_size), *map(len, self.chunk_tables)]
        padded = np.zeros((len(rows) + len(self.chunk_tables), max(widths)), np.int32)
        padded[: len(rows)] = self.tables[rows, : padded.shape[1]]
        for row, table in enumerate(self.chunk_tables, len(rows)):
            padded[row, : len(table)] = table
        return padded


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One call of `Ops.sample` for R rows of logits."""

    num_rows: int
    rows: np.ndarray | None  # int32[R], rows of the logits; None: all
    params: SamplingArrays | None  # on the host; None: the last with `keeps_params`, one position further
    keeps_params: bool = False  # a later call may reuse them


class LogprobRows(NamedTuple):
    """Hidden states whose logits score the next prompt token."""

    rows: np.ndarray  # int32[n]
    token_ids: np.ndarray  # int32[n], the tokens to score
    num_alternatives: int  # most likely tokens to return


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of a step. `copies` run in order, before any write; then `swap_outs` and `swap_ins` start."""

    forward: ForwardInputs | None  # None: no sequence runs
    samples: Sequence[SampleInputs] | None = None  # None: sent while the forward pass runs
    copies: np.ndarray = field(default_factory=no_blocks)  # int32[n, 2], from block, to block
    swap_outs: np.ndarray = field(default_factory=no_blocks)  # int32[n, 2], from block, to host block
    swap_ins: np.ndarray = field(default_factory=no_blocks)  # int32[n, 2], from host block, to block
    prompt_logprobs: Sequence[LogprobRows] = ()
    pool_rows: Sequence[tuple[int, int]] = ()  # hidden states to return, from and to (exclusive)

    @property
    def needs_hidden(self) -> bool:
        return bool(self.prompt_logprobs) or bool(self.pool_rows)
