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
STEP_WEIGHT = 0.1
"""Weight of the last step in means of step times."""
MAX_EXCESS = 2.0
"""Longer steps count as this many times what was expected: the machine had other work."""
MIN_SPEED_UP = 1.03
"""A smaller gain is within the error of the step times."""


class StepCost:
    """Seconds of a step by rows and drafts: measured of the model at start, corrected by each step."""

    def __init__(self, rows: Seq[int], seconds: Seq[float]):
        """`seconds` of a forward pass with each number of `rows`, ascending."""
        steady = np.maximum.accumulate(np.array(seconds, np.float64))
        self._forward: list[float] = np.interp(np.arange(rows[-1] + 1), rows, steady).tolist()  # by rows
        self._overhead_s = 0.0
        self._plain_s: dict[int, float] = {}  # of steps without drafts, by rows
        self._factor = 1.0  # of the share that drafts add

    def plain_s(self, num_rows: int) -> float:
        seen_s = self._plain_s.get(num_rows)
        return self._forward_s(num_rows) + self._overhead_s if seen_s is None else seen_s

    def drafted_s(self, num_rows: int, num_drafts: int) -> float:
        """Return seconds of `num_rows` and this number of drafts."""
        added = self._forward_s(num_rows + num_drafts) / self._forward_s(num_rows) - 1
        return self.plain_s(num_rows) * (1 + self._factor * added)

    def on_step(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn from a step of decodes, each one row and its drafts."""
        plain_s = self.plain_s(num_rows)
        if num_drafts:
            added_s = self.drafted_s(num_rows, num_drafts) - plain_s
            if added_s > 0:
                seen = min((seconds - plain_s) / added_s, MAX_EXCESS)
                self._factor *= max(0.5, 1 + STEP_WEIGHT * (seen - 1))
            return
        if num_rows in self._plain_s:
            seconds = min(seconds, MAX_EXCESS * plain_s)
        self._plain_s[num_rows] = plain_s + STEP_WEIGHT * (seconds - plain_s)
        excess_s = seconds - self._forward_s(num_rows) - self._overhead_s
        self._overhead_s = max(0.0, self._overhead_s + STEP_WEIGHT * excess_s)

    def _forward_s(self, num_rows: int) -> float:
        """Return the measured time; beyond the largest size each row adds the mean of a row."""
        largest = len(self._forward) - 1
        if num_rows <= largest:
            return self._forward[num_rows]
        return self._forward[largest] * num_rows / largest


@dataclass(slots=True)
class Counts:
    """Decayed trials of drafts."""

    accepted: float = 0.0
    trials: float = 0.0

    def add(self, num_accepted: int, num_trials: int) -> None:
        self.accepted += num_accepted
        self.trials += num_trials

    def decay(self, factor: float) -> None:
        self.accepted *= factor
        self.trials *= factor

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS)


@dataclass(slots=True)
class Acceptance:
    """Acceptance of verified drafts by source and sequence. Without a draft both forget, so that drafts are tried
    again."""

    _sources: dict[str, Counts] = field(default_factory=lambda: {source: Counts() for source in SOURCES})
    _sequences: WeakKeyDictionary[Sequence, Counts] = field(default_factory=WeakKeyDictionary)

    def rate(self, source: str) -> float:
        return self._sources[source].rate(FIRST_RATE)

    def gains(self, source: str, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[np.ndarray]:
        """Return for each sequence the chance float64[max_tokens] that all drafts up to each are accepted."""
        self._sources[source].decay(SOURCE_DECAY)
        return [
            self._rate(source, one) ** np.arange(1, count + 1) for one, count in zip(sequences, max_tokens, strict=True)
        ]

    def on_result(self, source: str, sequence: Sequence, num_accepted: int, num_drafts: int) -> None:
        num_trials = num_accepted + (num_accepted < num_drafts)
        self._sources[source].add(num_accepted, num_trials)
        self._sequences.setdefault(sequence, Counts()).add(num_accepted, num_trials)

    def _rate(self, source: str, sequence: Sequence) -> float:
        own, prior = self._sequences.get(sequence), self.rate(source)
        if own is None:
            return prior
        own.decay(DECAY)
        return own.rate(prior)


@dataclass(slots=True)
class DraftLengths:
    cost: StepCost | None = None
    """None: as many as there are."""
    lost_overlap_s: float = 0.0
    """Host time that a step with drafts does not hide: the next one is planned once it is collected."""

    def may_pay(self, gain: float, num_rows: int) -> bool:
        """Return False if drafts of `gain` expected tokens cannot be worth the first one's row. Cheap."""
        if self.cost is None:
            return True
        drafted_s = self.cost.drafted_s(num_rows, 1) + self.lost_overlap_s
        return gain > num_rows * (MIN_SPEED_UP * drafted_s / self.cost.plain_s(num_rows) - 1)

    def choose(self, gains: Seq[Seq[float] | np.ndarray], num_rows: int, token_s: float = 0.0) -> list[int]:
        """Return how many tokens to draft for each sequence of a step that has `num_rows` without.

        `gains`: of each sequence, descending, the chance that all drafts up to each are accepted. The best number of
        them is the one with the most expected tokens a second. `token_s`: to draft one token for all sequences.
        """
        counts = [len(own) for own in gains]
        longest = max(counts, default=0)
        if self.cost is None or longest == 0:
            return counts
        table = np.zeros((len(gains), longest))
        for row, own in zip(table, gains, strict=True):
            row[: len(own)] = own
        order = np.argsort(-table.ravel(), kind="stable")[: sum(counts)]
        tokens = num_rows + np.cumsum(table.ravel()[order])
        drafting_s = np.maximum.accumulate(order % longest + 1) * token_s + self.lost_overlap_s
        seconds = [self.cost.drafted_s(num_rows, count) for count in range(1, len(order) + 1)]
        rates = tokens / (np.array(seconds) + drafting_s)
        best = int(np.argmax(rates))
        if rates[best] < MIN_SPEED_UP * num_rows / self.cost.plain_s(num_rows):
            return [0] * len(gains)
        chosen: list[int] = np.bincount(order[: best + 1] // longest, minlength=len(gains)).tolist()
        return chosen
