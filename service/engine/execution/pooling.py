from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from service.engine.sequence import SequenceGroup
from service.engine.step import PooledPrompt, PoolSpan


class _Sum(NamedTuple):
    total: np.ndarray  # float64[H]
    num_rows: int


class Pooler:
    """Running sums of hidden rows, on the host: an embedding is needed only once per prompt."""

    def __init__(self) -> None:
        self._sums: WeakKeyDictionary[SequenceGroup, _Sum] = WeakKeyDictionary()

    @staticmethod
    def rows(spans: Sequence[PoolSpan], first_rows: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return each span's rows of hidden states (from, to)."""
        offsets = [first_rows[id(span.chunk)] - span.chunk.start for span in spans]
        return [(offset + span.start, offset + span.stop) for span, offset in zip(spans, offsets, strict=True)]

    def read(
        self, spans: Sequence[PoolSpan], fetches: Sequence[Callable[[], list[np.ndarray]]]
    ) -> tuple[PooledPrompt, ...]:
        """Wait for the rows; return completed vectors."""
        done = []
        for span, fetch in zip(spans, fetches, strict=True):
            group = span.chunk.sequence.group
            [rows] = fetch()
            before = self._sums.pop(group, _Sum(np.zeros(rows.shape[1]), 0))
            now = _Sum(
                before.total + rows.astype(np.float32).sum(axis=0, dtype=np.float64), before.num_rows + len(rows)
            )
            if span.stop == group.num_prompt_tokens:
                done.append(PooledPrompt(group, _unit(now.total / now.num_rows)))
            else:
                self._sums[group] = now
        return tuple(done)


def _unit(vector: np.ndarray) -> bytes:
    """Return float32[H], little-endian, of unit length; zero stays zero."""
    length = float(np.linalg.norm(vector))
    return (vector / length if length > 0 else vector).astype("<f4").tobytes()
