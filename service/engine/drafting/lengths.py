"""Draft lengths: for each sequence the number of tokens that makes tokens a second the most."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from service.engine.drafting.drafter import SOURCES
from service.engine.sequence import Sequence

FIRST_RATE = 0.7
"""Acceptance until any is seen; high enough to try."""
DECAY = 0.9
"""Factor of a sequence's counts, each step."""
SOURCE_DECAY = 0.995
"""Factor of a source's counts, each step."""
PRIOR_TRIALS = 4.0
"""Weight of the source's rate against a sequence's own trials."""
OVERHEAD_WEIGHT = 0.05
"""Weight of the last step in the mean of host time."""


class StepCost:
    """Seconds of a step by its rows: those measured of the model, and the host's, as seen."""

    def __init__(self, rows: Seq[int], seconds: Seq[float]):
        """`seconds` of a forward pass with each number of `rows`, ascending."""
        self._rows = np.array(rows, np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        self._overhead_s = 0.0

    def of(self, num_rows: np.ndarray) -> np.ndarray:
        """num_rows [any] -> seconds float64[any], as the last measured slope beyond the largest size."""
        beyond = np.maximum(0, num_rows - self._rows[-1]) * (self._seconds[-1] / self._rows[-1])
        seconds: np.ndarray = np.interp(num_rows, self._rows, self._seconds) + beyond + self._overhead_s
        return seconds

    def on_step(self, num_rows: int, seconds: float) -> None:
        """Correct the host's part by a step of decodes."""
        excess_s = seconds - float(self.of(np.array([num_rows]))[0])
        self._overhead_s = max(0.0, self._overhead_s + OVERHEAD_WEIGHT * excess_s)


@dataclass(slots=True)
class _Counts:
    """Decayed trials of drafts: one for each accepted draft, one for the first rejected."""

    accepted: float = 0.0
    trials: float = 0.0

    def add(self, num_accepted: int, num_drafts: int) -> None:
        self.accepted += num_accepted
        self.trials += num_accepted + (num_accepted < num_drafts)

    def decay(self, factor: float) -> None:
        self.accepted *= factor
        self.trials *= factor

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS)


@dataclass(slots=True)
class DraftLengths:
    """Acceptance by source and sequence. Without a draft both forget, so that drafts are tried again."""

    cost: StepCost | None = None
    """None: as many as there are."""
    _sources: dict[str, _Counts] = field(default_factory=lambda: {source: _Counts() for source in SOURCES})
    _sequences: WeakKeyDictionary[Sequence, _Counts] = field(default_factory=WeakKeyDictionary)

    def rate(self, source: str) -> float:
        return self._sources[source].rate(FIRST_RATE)

    def choose(
        self, source: str, sequences: Seq[Sequence], max_tokens: Seq[int], num_rows: int, token_s: float
    ) -> list[int]:
        """Return how many of at most `max_tokens` to draft for each sequence of a step that has `num_rows` without.

        Drafts are sorted by the chance that all up to them are accepted; the best number of them is the one with the
        most expected tokens a second. `token_s`: to draft one token for all sequences.
        """
        if self.cost is None:
            return list(max_tokens)
        self._sources[source].decay(SOURCE_DECAY)
        rates = np.array([self._rate(source, one) for one in sequences])
        longest = max(max_tokens, default=0)
        if longest == 0:
            return list(max_tokens)
        depth = np.arange(1, longest + 1)
        gains = np.where(depth <= np.array(max_tokens)[:, None], rates[:, None] ** depth, 0.0).ravel()
        order = np.argsort(-gains, kind="stable")[: sum(max_tokens)]
        tokens = num_rows + np.concatenate(([0.0], np.cumsum(gains[order])))
        drafting_s = np.concatenate(([0.0], np.maximum.accumulate(order % longest + 1) * token_s))
        seconds = self.cost.of(num_rows + np.arange(len(order) + 1)) + drafting_s
        best = int(np.argmax(tokens / seconds))
        chosen: list[int] = np.bincount(order[:best] // longest, minlength=len(sequences)).tolist()
        return chosen

    def on_result(self, source: str, sequence: Sequence, num_accepted: int, num_drafts: int) -> None:
        self._sources[source].add(num_accepted, num_drafts)
        self._sequences.setdefault(sequence, _Counts()).add(num_accepted, num_drafts)

    def _rate(self, source: str, sequence: Sequence) -> float:
        own, prior = self._sequences.get(sequence), self.rate(source)
        if own is None:
            return prior
        own.decay(DECAY)
        return own.rate(prior)
