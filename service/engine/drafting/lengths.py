"""Choice of how many tokens to draft for each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from service.engine.drafting.drafter import SOURCES
from service.engine.drafting.step_cost import StepCost
from service.engine.sequence import Sequence

FIRST_RATE = 0.7
"""Acceptance until any is seen; high enough to try."""
DECAY = 0.9
"""Factor of a sequence's counts, each step."""
SOURCE_DECAY, FADE, MIN_TRIALS = 0.995, 0.98, 16.0
"""Factors of a source's counts, each step with drafts and without; FADE ends at MIN_TRIALS."""
PRIOR_TRIALS = 4.0
"""Weight of the source's rate against a sequence's own trials."""
MIN_SPEED_UP = 1.03
"""A smaller gain is within the error of the step times."""
TRIAL_SHARE = 0.005
"""Share of time for trials of the slower choice, drafts or none."""
PLAIN_STEPS = 3
"""Steps of a trial without drafts; the first does not overlap."""
LONGEST = (1, 2, 3, 4, 6, 8, 12)
"""Limits to compare where drafting takes time."""


Gains = Seq[Seq[float]] | np.ndarray


class Drafting(NamedTuple):
    """Limits of a step's drafts."""

    token_s: float = 0.0  # to draft one token for all sequences
    max_drafts: int | None = None  # in all
    hope: float = 1.0  # exponent of the chances in a trial; 1: they are known


FREE = Drafting()


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
    """Acceptance by source and sequence. Sequences forget, so that each is tried again."""

    _sources: dict[str, Counts] = field(default_factory=lambda: {source: Counts() for source in SOURCES})
    _sequences: WeakKeyDictionary[Sequence, Counts] = field(default_factory=WeakKeyDictionary)

    def rate(self, source: str) -> float:
        return self._sources[source].rate(FIRST_RATE)

    def gains(self, source: str, sequences: Seq[Sequence], max_tokens: Seq[int]) -> np.ndarray:
        """Return float64[S, max(max_tokens)], the chance that all drafts up to each are accepted, or 0."""
        prior, counts = self.rate(source), np.array(max_tokens, np.int64)
        rates = np.array([self._rate(prior, one) for one in sequences], np.float64)
        numbers = np.arange(1, counts.max(initial=0) + 1)
        gains: np.ndarray = np.where(numbers <= counts[:, None], rates[:, None] ** numbers, 0.0)
        return gains

    def on_step(self, source: str, num_drafts: int) -> None:
        """Forget a little, before a step's results."""
        counts = self._sources[source]
        if num_drafts:
            counts.decay(SOURCE_DECAY)
        elif counts.trials > MIN_TRIALS:
            counts.decay(FADE)

    def on_result(self, source: str, sequence: Sequence, num_accepted: int, num_drafts: int) -> None:
        num_trials = num_accepted + (num_accepted < num_drafts)
        self._sources[source].add(num_accepted, num_trials)
        self._sequences.setdefault(sequence, Counts()).add(num_accepted, num_trials)

    def _rate(self, prior: float, sequence: Sequence) -> float:
        own = self._sequences.get(sequence)
        if own is None:
            return prior
        own.decay(DECAY)
        return own.rate(prior)


class _Option(NamedTuple):
    """Numbers of drafts with the most tokens/s."""

    speed_up: float  # over no drafts
    counts: list[int]  # of each sequence
    lost_s: float = 0.0  # against no drafts


@dataclass(slots=True)
class DraftLengths:
    cost: StepCost | None = None
    """None: as many as there are."""
    _budget_s: float = 0.0  # for trials
    _is_trial: bool = False  # the last choice
    _plain_steps: int = 0  # left of a trial
    _is_drafting: bool = False  # in the last step

    def may_pay(self, gain: float, num_rows: int) -> bool:
        """Return False if `gain` expected tokens cannot pay for a row. Cheap."""
        if self.cost is None:
            return True
        hoped_s = float(self.cost.hoped_s(num_rows, np.array([1]))[0])
        return gain > num_rows * (MIN_SPEED_UP * hoped_s / self.cost.plain_s(num_rows) - 1)

    def choose(self, gains: Gains, num_rows: int, drafting: Drafting = FREE) -> list[int]:
        """Return each sequence's number of drafts with the most expected tokens/s, for a step of `num_rows` decodes.
        `gains`: as Acceptance.gains."""
        counts, self._is_trial = self._choose(_table(gains), num_rows, drafting)
        return counts

    def on_planned(self, num_drafts: int) -> None:
        """Pay for a trial once its step is planned."""
        if self._is_trial:
            self._budget_s, self._is_trial = 0.0, False
            self._plain_steps = 0 if num_drafts else PLAIN_STEPS

    def on_step(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn from a step of `num_rows` decodes."""
        if self.cost is not None:
            self.cost.on_step(num_rows, num_drafts, seconds)
        self._budget_s += TRIAL_SHARE * seconds
        self._plain_steps = max(0, self._plain_steps - 1)
        self._is_drafting = num_drafts > 0

    def _choose(self, table: np.ndarray, num_rows: int, drafting: Drafting) -> tuple[list[int], bool]:
        """Return the numbers, and whether they are a trial."""
        num_drafts, nothing = int(np.count_nonzero(table)), [0] * len(table)
        if drafting.max_drafts is not None:
            num_drafts = min(num_drafts, drafting.max_drafts)
        if num_drafts <= 0 or self._plain_steps:
            return nothing, False
        if self.cost is None:
            return _counts(table, _best_first(table, num_drafts)), False
        best, hoped = self._options(self.cost, table, num_rows, num_drafts, drafting)
        plain_s = self.cost.plain_s(num_rows)
        if best.speed_up >= MIN_SPEED_UP:
            lost_s = PLAIN_STEPS * plain_s * (1 - 1 / best.speed_up)
            return (nothing, True) if self._budget_s > lost_s else (best.counts, False)
        lost_s = max(hoped.lost_s, (MIN_SPEED_UP - 1) * plain_s)
        if hoped.speed_up >= MIN_SPEED_UP and self._budget_s > lost_s:
            return hoped.counts, True
        return nothing, False

    def _options(
        self, cost: StepCost, table: np.ndarray, num_rows: int, num_drafts: int, drafting: Drafting
    ) -> tuple[_Option, _Option]:
        """Return the best as expected, and as a trial hopes."""
        numbers, plain_s = np.arange(1, num_drafts + 1), cost.plain_s(num_rows)
        # After a plain step, drafts cost two overlaps.
        switch_s = 0.0 if self._is_drafting else cost.excess_s(num_rows)
        step_s = cost.drafted_s(num_rows, numbers) + switch_s, cost.hoped_s(num_rows, numbers)
        options: tuple[list[_Option], list[_Option]] = [], []
        for longest in [most for most in LONGEST if drafting.token_s and most < table.shape[1]] + [table.shape[1]]:
            part = table[:, :longest]
            order = _best_first(part, num_drafts)
            chances = part.ravel()[order]
            seconds = [each[: len(order)] + longest * drafting.token_s for each in step_s]
            plain_tokens = seconds[0] * num_rows / plain_s  # in the same time
            tokens = num_rows + np.cumsum(chances)
            hoped = (num_rows + np.cumsum(chances**drafting.hope)) * plain_s / (num_rows * seconds[1])
            for found, speed_ups in zip(options, (tokens / plain_tokens, hoped), strict=True):
                best = int(np.argmax(speed_ups))
                lost_s = float(plain_tokens[best] - tokens[best]) * plain_s / num_rows
                found.append(_Option(float(speed_ups[best]), _counts(table, order[: best + 1], longest), lost_s))
        expected, hoped_for = (max(found, key=attrgetter("speed_up")) for found in options)
        return expected, hoped_for


def _table(gains: Gains) -> np.ndarray:
    """Return float64[S, longest], padded with 0."""
    if isinstance(gains, np.ndarray):
        return gains
    table = np.zeros((len(gains), max(map(len, gains), default=0)))
    for row, own in zip(table, gains, strict=True):
        row[: len(own)] = own
    return table


def _best_first(table: np.ndarray, most: int) -> np.ndarray:
    """Return flat indices of the largest nonzero chances."""
    return np.argsort(-table.ravel(), kind="stable")[: min(most, int(np.count_nonzero(table)))]


def _counts(table: np.ndarray, chosen: np.ndarray, longest: int | None = None) -> list[int]:
    counts: list[int] = np.bincount(chosen // (longest or table.shape[1]), minlength=len(table)).tolist()
    return counts
