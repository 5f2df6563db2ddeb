"""Choice of the number of draft tokens per sequence."""

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
"""Assumed acceptance before any observation; high enough to try drafts."""
DECAY = 0.95
"""Per-step decay of a sequence's counts."""
SOURCE_DECAY, FADE, MIN_TRIALS = 0.995, 0.98, 16.0
"""Per-step decay of a source's counts, with drafts and without; FADE stops at MIN_TRIALS."""
PRIOR_TRIALS, SEQUENCE_PRIOR_TRIALS = 4.0, 12.0
"""Weights of FIRST_RATE against a source's trials, and of the source's rate against a sequence's own."""
MIN_SPEED_UP = 1.03
"""Smaller gains are within the error of the step times."""
TRIAL_SHARE = 0.005
"""Share of time spent on trials of the slower choice (drafts or none)."""
MAX_CHARGE = 1.0
"""Maximum charge for a trial of drafts, in plain steps: once for the expected cost, once for the excess. The next trial
follows after 400 plain steps at the latest."""
PLAIN_STEPS = 3
"""Steps of a trial without drafts; the first does not overlap."""
SWITCH_STEPS = 8
"""Minimum steps over which a switch to drafts is amortised."""
LONGEST = (1, 2, 3, 4, 6, 8, 12)
"""Length limits to compare where drafting takes time."""


Gains = Seq[Seq[float]] | np.ndarray


class Drafting(NamedTuple):
    """Limits of a step's drafts."""

    token_s: float = 0.0  # to draft one token for all sequences
    max_drafts: int | None = None  # over all sequences
    hope: float = 0.0  # minimum acceptance that a trial assumes; 0: the chances are known


FREE = Drafting()


@dataclass(slots=True)
class Counts:
    """Decayed counts of draft trials."""

    accepted: float = 0.0
    trials: float = 0.0

    def add(self, num_accepted: int, num_trials: int) -> None:
        self.accepted += num_accepted
        self.trials += num_trials

    def decay(self, factor: float) -> None:
        self.accepted *= factor
        self.trials *= factor

    def rate(self, prior: float, weight: float = PRIOR_TRIALS) -> float:
        return (self.accepted + weight * prior) / (self.trials + weight)


@dataclass(slots=True)
class Acceptance:
    """Acceptance by source and sequence. Sequence counts decay, so that each sequence is retried."""

    _sources: dict[str, Counts] = field(default_factory=lambda: {source: Counts() for source in SOURCES})
    _sequences: WeakKeyDictionary[Sequence, Counts] = field(default_factory=WeakKeyDictionary)

    def rate(self, source: str) -> float:
        return self._sources[source].rate(FIRST_RATE)

    def gains(self, source: str, sequences: Seq[Sequence], max_tokens: Seq[int]) -> np.ndarray:
        """Return float64[S, max(max_tokens)]: the chance that all drafts up to each are accepted; 0 beyond a sequence's
        limit."""
        prior, counts = self.rate(source), np.array(max_tokens, np.int64)
        rates = np.array([self._rate(prior, one) for one in sequences], np.float64)
        numbers = np.arange(1, counts.max(initial=0) + 1)
        gains: np.ndarray = np.where(numbers <= counts[:, None], rates[:, None] ** numbers, 0.0)
        return gains

    def on_step(self, source: str, num_drafts: int) -> None:
        """Decay a source's counts, before a step's results."""
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
        return own.rate(prior, SEQUENCE_PRIOR_TRIALS)


class _Option(NamedTuple):
    tokens_per_s: float
    chosen: np.ndarray  # flat indices into the chances
    drafting_s: float


class _Trial(NamedTuple):
    """Step with the slower choice: `num_rows` decodes, `plain_s` seconds without drafts."""

    plain_s: float
    num_rows: int
    lost_s: float  # charged
    added_s: float = 0.0  # by drafts


@dataclass(slots=True)
class DraftLengths:
    cost: StepCost | None = None
    """None: draft as many as possible."""
    is_idle: bool = False  # no drafts paid off in the last choice, and no trial was due
    _budget_s: float = 0.0  # for trials
    _trial: _Trial | None = None  # if the last choice is one
    _refund_s: float = 0.0  # per accepted draft of the last step with drafts
    _charged_s: float = 0.0  # for the trial; the maximum refund
    _plain_steps: int = 0  # left of a trial
    _is_drafting: bool = False  # in the last step

    def may_pay(self, gain: float, num_rows: int) -> bool:
        """Return False if `gain` expected tokens cannot pay for one row; cheap."""
        if self.cost is None:
            return True
        hoped_s = self.cost.hoped_s(num_rows, 1)
        return gain > num_rows * (MIN_SPEED_UP * hoped_s / self.cost.plain_s(num_rows) - 1)

    def choose(self, gains: Gains, num_rows: int, drafting: Drafting = FREE) -> list[int]:
        """Return the number of drafts per sequence that maximises expected tokens/s of a step with `num_rows` decodes.
        `gains`: as from Acceptance.gains."""
        self.is_idle = False
        counts, self._trial = self._choose(_table(gains), num_rows, drafting)
        return counts

    def on_planned(self, num_drafts: int, drafting_s: float = 0.0) -> None:
        """Charge a trial once its step is planned; its drafts took `drafting_s`."""
        trial, self._trial = self._trial, None
        if num_drafts:
            self._charged_s = 0.0
        if trial is None:
            return
        self._plain_steps = 0 if num_drafts else PLAIN_STEPS
        added_s = trial.added_s + drafting_s
        debt_s = max(0.0, min(added_s - trial.lost_s, MAX_CHARGE * trial.plain_s)) if num_drafts else 0.0
        self._budget_s = -debt_s
        if num_drafts:
            self._charged_s = trial.lost_s + debt_s
            self._refund_s = trial.plain_s / trial.num_rows * min(1.0, self._charged_s / max(added_s, 1e-9))

    def on_accepted(self, num_drafts: int) -> None:
        """Refund a trial by its accepted drafts: a trial that paid for itself is followed by another."""
        self._budget_s += min(self._charged_s, num_drafts * self._refund_s)

    def on_step(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        if self.cost is not None:
            self.cost.on_step(num_rows, num_drafts, seconds)
        self._budget_s += TRIAL_SHARE * seconds
        self._plain_steps = max(0, self._plain_steps - 1)
        self._is_drafting = num_drafts > 0

    def _choose(self, table: np.ndarray, num_rows: int, drafting: Drafting) -> tuple[list[int], _Trial | None]:
        """Return the numbers of drafts, and a trial if they are one."""
        num_drafts, nothing = int(np.count_nonzero(table)), [0] * len(table)
        if drafting.max_drafts is not None:
            num_drafts = min(num_drafts, drafting.max_drafts)
        if num_drafts <= 0 or self._plain_steps:
            return nothing, None
        if self.cost is None:
            return _counts(table, _best_first(table, num_drafts)), None
        plain_s = self.cost.plain_s(num_rows)
        expected_s = self._drafted_s(self.cost, num_rows, num_drafts)
        best = max(_options(table, expected_s, num_rows, drafting), key=attrgetter("tokens_per_s"))
        speed_up = best.tokens_per_s * plain_s / num_rows
        if speed_up >= MIN_SPEED_UP:
            lost_s = PLAIN_STEPS * plain_s * (1 - 1 / speed_up)
            is_due = self._is_drafting and self._budget_s > lost_s
            return (nothing, _Trial(plain_s, num_rows, lost_s)) if is_due else (_counts(table, best.chosen), None)
        trial = self._due_trial(self.cost, table, num_rows, expected_s, drafting)
        self.is_idle = trial is None
        return trial or (nothing, None)

    def _drafted_s(self, cost: StepCost, num_rows: int, num_drafts: int) -> np.ndarray:
        """Return the seconds of steps with 1 to `num_drafts` drafts. After a plain step, drafts cost two overlaps."""
        switch_s = 0.0 if self._is_drafting else cost.excess_s(num_rows) / SWITCH_STEPS
        return cost.drafted_s(num_rows, num_drafts) + switch_s

    def _due_trial(
        self, cost: StepCost, table: np.ndarray, num_rows: int, expected_s: np.ndarray, drafting: Drafting
    ) -> tuple[list[int], _Trial] | None:
        """Return the best drafts under a trial's assumptions, if the budget allows. Drafts that add at most one plain
        step are preferred."""
        plain_s = cost.plain_s(num_rows)
        least_s = (MIN_SPEED_UP - 1) * plain_s
        if self._budget_s <= least_s:
            return None
        hoped_s = cost.drafted_s(num_rows, len(expected_s), with_excess=False)
        chances = np.where(table > 0, np.maximum(table, drafting.hope ** np.arange(1, table.shape[1] + 1)), 0.0)
        enough = MIN_SPEED_UP * num_rows / plain_s
        hopes = [each for each in _options(chances, hoped_s, num_rows, drafting) if each.tokens_per_s >= enough]
        if not hopes:
            return None
        around_s = 2 * cost.excess_s(num_rows)  # the steps before and after it do not overlap either
        added_s = [float(expected_s[len(each.chosen) - 1]) + around_s + each.drafting_s - plain_s for each in hopes]
        pairs = list(zip(hopes, added_s, strict=True))
        cheap = [(each, added) for each, added in pairs if added + each.drafting_s <= plain_s]
        best, added = max(cheap or pairs[:1], key=lambda pair: pair[0].tokens_per_s)
        gained_s = float(table.ravel()[best.chosen].sum()) * plain_s / num_rows
        lost_s = min(MAX_CHARGE * plain_s, max(added + best.drafting_s - gained_s, least_s))
        if self._budget_s <= lost_s:
            return None
        return _counts(table, best.chosen), _Trial(plain_s, num_rows, lost_s, added)


def _options(chances: np.ndarray, seconds: np.ndarray, num_rows: int, drafting: Drafting) -> list[_Option]:
    """Return the best of `chances` [S, longest] for each length limit. `seconds`: of steps with 1, 2, ... drafts."""
    flat, width = chances.ravel(), chances.shape[1]
    order, options = _best_first(chances, flat.size), []
    limits = [most for most in LONGEST if drafting.token_s and most < width]
    columns = order % width if limits else order
    for longest in (*limits, width):
        chosen = (order if longest == width else order[columns < longest])[: len(seconds)]
        drafting_s = longest * drafting.token_s
        rates = (flat[chosen].cumsum() + num_rows) / (seconds[: len(chosen)] + drafting_s)
        best = int(rates.argmax())
        options.append(_Option(float(rates[best]), chosen[: best + 1], drafting_s))
    return options


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


def _counts(table: np.ndarray, chosen: np.ndarray) -> list[int]:
    counts: list[int] = np.bincount(chosen // table.shape[1], minlength=len(table)).tolist()
    return counts
