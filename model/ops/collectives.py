"""Operations across the ranks of a group: the interface, and the CPU's implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from model.ops.cpu.sampling import best_candidates
from model.ops.interface import Array, Sampled, TokenCandidates


class Collectives(Protocol):
    """Operations across ranks. Every rank gets the same bits. Results live as long as those of `Ops`."""

    def sum(self, parts: Sequence[Array]) -> list[Array]:
        """Return on each rank the sum of one array per rank, in rank order in float32, rounded once to their dtype."""

    def gather(self, parts: Sequence[Array], *, copies: int = 1, width: int | None = None) -> list[Array]:
        """Return [T, width] (default: all columns) on each rank: the parts [T, n] of ranks 0, copies, 2 * copies, ...
        side by side."""

    def best(self, parts: Sequence[TokenCandidates], outs: Sequence[Array | None]) -> list[Sampled]:
        """Return on each rank the best of the ranks' candidates [R], whose tokens are in rank order; ids go to its
        `outs` int32[R] if given."""


class NumpyCollectives:
    """Specification of `Collectives`, for ranks in one memory."""

    def sum(self, parts: Sequence[Array]) -> list[Array]:
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part.astype(np.float32, copy=False)
        return [total.astype(part.dtype) for part in parts]

    def gather(self, parts: Sequence[Array], *, copies: int = 1, width: int | None = None) -> list[Array]:
        whole = np.concatenate(parts[::copies], axis=1)[:, :width]
        return [np.array(whole) for _ in parts]

    def best(self, parts: Sequence[TokenCandidates], outs: Sequence[Array | None]) -> list[Sampled]:
        columns = zip(*((each.token_ids, each.score, each.tie) for each in parts), strict=True)
        together = TokenCandidates(*(np.stack(column, axis=1) for column in columns))
        return [best_candidates(together, out) for out in outs]
