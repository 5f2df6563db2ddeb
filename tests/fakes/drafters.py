"""Drafters that are right, wrong, or break their contract."""

from __future__ import annotations

import random
from collections.abc import Mapping

from service.engine.drafting.drafter import NGRAM
from service.engine.sequence import Sequence


class FakeDrafter:
    source, writes_cache, token_s = NGRAM, False, 0.0

    def draft(self, sequences: list[Sequence], max_tokens: list[int]) -> list[tuple[int, ...]]:
        return [self.of(one, count) for one, count in zip(sequences, max_tokens, strict=True)]

    def on_end(self, sequence: Sequence) -> None:
        """Keep nothing."""


class KnowingDrafter(FakeDrafter):
    """Drafter of the known answer, wrong from a random position on, or empty at times."""

    def __init__(self, answers: Mapping[tuple[str, int], list[int]], *, errs: bool = False, first: int = 0):
        """`first`: the position at which each branch's answer is resumed."""
        self._answers, self._errs, self._first = answers, errs, first

    def of(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        answer = self._answers.get((sequence.request_id, sequence.branch), [])
        start = sequence.num_output_tokens
        right = tuple(answer[start : start + count])
        if not self._errs:
            return right
        rng = random.Random(start * 31 + sequence.branch)
        kept = rng.randrange(len(right) + 1)
        return () if rng.random() < 0.3 else (*right[:kept], *(rng.randrange(5, 4000) for _ in range(count - kept)))


class LyingDrafter(FakeDrafter):
    def of(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        return tuple((sequence.token_ids[-1] + 17 * index + 1) % 4000 for index in range(count))


class OutOfRangeDrafter(FakeDrafter):
    """Drafter of ids outside the vocabulary, first or after some."""

    def of(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        return (-1, 1 << 40, 4096, 7, 300, 99_999)[sequence.num_tokens % 4 :][:count]


class WrongLengthDrafter(FakeDrafter):
    """Drafter of more tokens than asked for, or none."""

    def of(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        return (300,) * (count + 40) if sequence.num_tokens % 3 else ()
