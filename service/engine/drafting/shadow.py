"""Shadow drafts: guesses that no step verifies. The tokens sampled later show which were right, so a sequence drafts
only once its guesses hold, and costs nothing until then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.engine.drafting.drafter import Drafter
from service.engine.drafting.lengths import Counts
from service.engine.sequence import Sequence

FIRST_RATES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.9)
"""Initial share of right guesses after 0, 1, 2 to 3, 4 to 7, 8 to 15 and more right guesses in a row."""
LONGEST_STREAK = 1 << (len(FIRST_RATES) - 2)
RATE_DECAY = 0.998
"""Decay of the counts per guess."""
GUESSES_PER_TABLE = 16
"""Guesses between updates of the rates."""


@dataclass(slots=True)
class Shadow:
    position: int  # tokens compared
    drafts: tuple[int, ...] = ()
    num_right: int = 0  # of `drafts`
    streak: int = 0  # right guesses in a row


class ShadowDrafts:
    """Guesses for each running sequence, from a drafter that needs no device."""

    def __init__(self, drafter: Drafter, max_drafts: int):
        self.source = drafter.source
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._shadows: dict[Sequence, Shadow] = {}
        self._counts = [Counts() for _ in FIRST_RATES]
        self._gains: dict[int, list[float]] = {}  # by streak
        self._num_guesses = 0  # since `_gains` was cleared

    def look(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, Shadow]]:
        """Compare the tokens known since the last call; draft again after a wrong guess or once half the drafts are
        used. Return the sequences with drafts."""
        shadows, found, stale = self._shadows, [], []
        for sequence in sequences:
            shadow = shadows.get(sequence)
            if shadow is None:
                shadow = shadows[sequence] = Shadow(len(sequence.token_ids))
            elif shadow.position < len(sequence.token_ids):
                if shadow.drafts:
                    self._compare(shadow, sequence)
                shadow.position = len(sequence.token_ids)
            if 2 * (len(shadow.drafts) - shadow.num_right) <= self._max_drafts:
                stale.append((sequence, shadow))
            else:
                found.append((sequence, shadow))
        if stale:
            drafted = self._drafter.draft([one for one, _ in stale], [self._max_drafts] * len(stale))
            for pair, drafts in zip(stale, drafted, strict=True):
                shadow = pair[1]
                shadow.drafts, shadow.num_right = tuple(drafts), 0
                if drafts:
                    found.append(pair)
                else:
                    shadow.streak = 0
        return found

    def gains(self, streak: int) -> list[float]:
        """Return the chance that all guesses up to each are right, for `max_drafts` guesses after a streak."""
        streak = min(streak, LONGEST_STREAK)
        gains = self._gains.get(streak)
        if gains is None:
            gains, chance = [], 1.0
            for length in range(streak, streak + self._max_drafts):
                chance *= self._rate(length)
                gains.append(chance)
            self._gains[streak] = gains
        return gains

    def on_end(self, sequence: Sequence) -> None:
        self._shadows.pop(sequence, None)

    def _compare(self, shadow: Shadow, sequence: Sequence) -> None:
        tokens = sequence.token_ids[shadow.position :]
        for token, draft in zip(tokens, shadow.drafts[shadow.num_right :], strict=False):
            counts = self._counts[_bucket(shadow.streak)]
            counts.decay(RATE_DECAY)
            counts.add(token == draft, 1)
            self._num_guesses += 1
            if token != draft:
                shadow.drafts, shadow.num_right, shadow.streak = (), 0, 0
                break
            shadow.num_right += 1
            shadow.streak += 1
        if self._num_guesses >= GUESSES_PER_TABLE:
            self._num_guesses = 0
            self._gains.clear()

    def _rate(self, streak: int) -> float:
        bucket = _bucket(streak)
        return self._counts[bucket].rate(FIRST_RATES[bucket])


def _bucket(streak: int) -> int:
    return min(streak.bit_length(), len(FIRST_RATES) - 1)
