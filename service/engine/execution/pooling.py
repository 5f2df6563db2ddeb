"""Embeddings: hidden states of whole prompts, pooled to one vector each, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from model.ops.interface import Array, Ops
from service.engine.sequence import SequenceGroup
from service.engine.step import PooledPrompt, PoolSpan, StepPlan


class _Sum(NamedTuple):
    total: np.ndarray  # float64[H]
    num_rows: int


@dataclass(frozen=True, slots=True)
class PendingPool:
    """Rows of a pool span in flight."""

    pool: PoolSpan
    fetch: Callable[[], list[np.ndarray]]


class Pooler:
    """Sums rows on the host: an embedding is needed once a prompt, and the step's other work goes on meanwhile."""

    def __init__(self, ops: Ops):
        self._ops = ops
        self._sums: WeakKeyDictionary[SequenceGroup, _Sum] = WeakKeyDictionary()

    def start(self, hidden: Array, plan: StepPlan) -> list[PendingPool]:
        """Download the rows of the plan's pool spans from hidden [T, H], the rows of its chunks in order."""
        first_rows = np.cumsum([0, *(chunk.length for chunk in plan.chunks)]).tolist()
        row_of = dict(zip(map(id, plan.chunks), first_rows, strict=False))
        pending = []
        for pool in plan.pool_spans:
            first = row_of[id(pool.chunk)] - pool.chunk.start
            rows = hidden[first + pool.start : first + pool.stop]
            pending.append(PendingPool(pool, self._ops.download_later([rows])))
        return pending

    def finish(self, pending: Sequence[PendingPool]) -> tuple[PooledPrompt, ...]:
        """Wait for the rows; return the vectors of prompts that are complete."""
        done = []
        for part in pending:
            group = part.pool.chunk.sequence.group
            [rows] = part.fetch()
            before = self._sums.pop(group, _Sum(np.zeros(rows.shape[1]), 0))
            now = _Sum(
                before.total + rows.astype(np.float32).sum(axis=0, dtype=np.float64), before.num_rows + len(rows)
            )
            if part.pool.stop == group.num_prompt_tokens:
                done.append(PooledPrompt(group, _unit(now.total / now.num_rows)))
            else:
                self._sums[group] = now
        return tuple(done)


def _unit(vector: np.ndarray) -> bytes:
    """Return float32[H], little-endian, of length 1; a zero vector stays zero."""
    length = float(np.linalg.norm(vector))
    return (vector / length if length > 0 else vector).astype("<f4").tobytes()
