"""Beam search: which continuations of a request are followed, which are answers already, and when it is over.

At each step every beam offers its likeliest next tokens. All offers of a request are ranked by the sum of the
log-probabilities of their tokens, equals by the rank of their beam and then by token id. An offer that ends (with a
stop id or EOS, where nothing may follow in its grammar, or at the request's length) becomes an answer if it ranks among
the first `width`; the best `width` of the others are the next beams. An answer's score is its sum over its length, the
ending token included, to the power of `length_penalty`; the best `width` answers are kept. With `width` of them the
search is over at once where `early_stopping` is True, else as soon as the best beam cannot beat the worst answer: by
its score as it stands where it is False, by the score it would have at full length where it is "never" and the penalty
favours length. This is what Hugging Face's `generate` does.

logit_bias, penalties, a grammar's mask and min_tokens (which forbids stop ids) apply to the model's log-probabilities,
after the softmax, and the sums are of what results: Hugging Face's logits processors do the same in a beam search.
Temperature, top_k, top_p, min_p and the seed are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from model.sampling_params import SamplingParams
from service.engine.kv.kv_manager import KVManager
from service.engine.request import BranchPast, Request
from service.engine.sequence import Sequence, SequenceGroup, State, stop_ids
from service.engine.step import TokenLogprob
from service.errors import EndReason

TOLD_AT_ONCE = 1024
"""Tokens of an answer in one piece."""


class Told(NamedTuple):
    """A piece of an answer, with its end where it is the last one."""

    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: EndReason | None


class Trail(NamedTuple):
    """The log-probabilities of a beam's tokens, the last one first: beams share what they have in common."""

    last: TokenLogprob
    before: Trail | None


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that goes on; `sum_logprob` is that of its tokens, natural logarithms."""

    sequence: Sequence
    sum_logprob: float = 0.0
    trail: Trail | None = None


class Offer(NamedTuple):
    """A token that a beam may go on with. Offers sort best first."""

    cost: float  # less is better: the sum of the log-probabilities, negated
    rank: int  # of its beam
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A sequence that has ended; the higher its `score`, the better."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # as many as tokens where they are wanted, else none
    end: EndReason


class BeamSearch:
    """Of one request; `beams` are those that go on, the best first, and `answers` those that ended."""

    def __init__(self, wishes: SamplingParams, ends: frozenset[int]):
        """`ends`: the token ids that end an answer."""
        self._wishes = wishes
        self._width = wishes.beam.width
        self._ends = ends
        self.num_alternatives = max(self._width + len(ends), wishes.logprobs or 0)
        """Of so many best tokens of each beam, no other can be among the next beams or answers, unless more than
        `width` of them complete a grammar: then the next beams are found among these."""
        self.beams: list[Beam] = []
        self.answers: list[Answer] = []

    def rank(self, rows: Seq[TokenLogprob]) -> list[Offer]:
        """What follows the beams, whose last logits gave `rows`: at most `width` offers, the best first.

        Those that end become answers. Nothing follows once the search is over.
        """
        offers = sorted(
            Offer(-beam.sum_logprob - logprob, rank, token_id, logprob)
            for rank, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
            if logprob > -math.inf
        )
        num_tokens = self.beams[0].sequence.num_output_tokens + 1
        is_last = num_tokens == self._wishes.max_tokens
        following: list[Offer] = []
        for place, offer in enumerate(offers):
            if place >= self._width and (is_last or len(following) == self._width):
                break
            may_stop = num_tokens >= self._wishes.min_tokens
            stops = (may_stop and offer.token_id in self._ends) or self._completes(offer)
            if stops or is_last:
                if place < self._width:
                    self._answer(offer, rows[offer.rank], num_tokens, EndReason.STOP if stops else EndReason.LENGTH)
            elif len(following) < self._width:
                following.append(offer)
        return [] if self._is_over(following, num_tokens) else following

    def follow(self, offer: Offer, row: TokenLogprob, sequence: Sequence) -> Beam:
        """The beam that goes on with the offer, in this sequence."""
        return Beam(sequence, -offer.cost, self._trail(offer, row))

    def _completes(self, offer: Offer) -> bool:
        """Whether the offer's beam has a grammar in which nothing may follow the token, or that may end before it."""
        matcher = self.beams[offer.rank].sequence.matcher
        if matcher is None:
            return False
        ahead = matcher.copy()
        if not ahead.advance((offer.token_id,)):
            return offer.token_id in self._ends and matcher.is_complete
        return ahead.is_finished

    def _answer(self, offer: Offer, row: TokenLogprob, num_tokens: int, end: EndReason) -> None:
        sequence = self.beams[offer.rank].sequence
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        logprobs, trail = [], self._trail(offer, row)
        while trail is not None:
            logprobs.append(trail.last)
            trail = trail.before
        score = self._score(-offer.cost, num_tokens)
        self.answers.append(Answer(score, (*output, offer.token_id), tuple(reversed(logprobs)), end))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self._width :]

    def _trail(self, offer: Offer, row: TokenLogprob) -> Trail | None:
        count = self._wishes.logprobs
        if count is None:
            return None
        told = TokenLogprob(offer.logprob, row.top_ids[:count], row.top_logprobs[:count])
        return Trail(told, self.beams[offer.rank].trail)

    def _score(self, sum_logprob: float, num_tokens: int) -> float:
        return sum_logprob / num_tokens**self._wishes.beam.length_penalty

    def _is_over(self, following: Seq[Offer], num_tokens: int) -> bool:
        if not following:
            return True
        if len(self.answers) < self._width:
            return False
        wish = self._wishes.beam
        if wish.early_stopping is True:
            return True
        if wish.early_stopping == "never" and wish.length_penalty > 0:
            num_tokens = self._wishes.max_tokens
        return self._score(-following[0].cost, num_tokens) <= self.answers[-1].score


class BeamGroup(SequenceGroup):
    """A request that searches: its branches are places of beams, as many as the search is wide."""

    def __init__(self, request: Request, eos_token_ids: frozenset[int]):
        self._search = BeamSearch(request.sampling, stop_ids(request.sampling, eos_token_ids))
        self._rows: dict[Sequence, TokenLogprob] = {}
        super().__init__(request, eos_token_ids)

    @property
    def answers(self) -> list[Answer]:
        """Those asked for, the best first: each is a branch to whoever hears of it."""
        return self._search.answers[: self.request.sampling.n]

    def untold(self) -> list[Told]:
        """The answers, piece by piece, less what another engine has told: it found the same."""
        pieces = []
        for branch, answer in enumerate(self.answers):
            past = self.request.past[branch] if branch < len(self.request.past) else BranchPast()
            if past.end is None:
                length, start = len(answer.token_ids), len(past.token_ids)
                for first in range(start, max(length, start + 1), TOLD_AT_ONCE):
                    last = first + TOLD_AT_ONCE
                    end = answer.end if last >= length else None
                    pieces.append(Told(branch, answer.token_ids[first:last], answer.logprobs[first:last], end))
        return pieces

    def park(self) -> None:
        super().park()
        self._rows.clear()  # they come again: all that waits is computed once more
        if not self._search.beams:
            self.live[0].lead([])  # the others fork by rank, once the first logits are known

    def part(self) -> None:
        super().part()
        self._rows.clear()
        self._search.beams = []

    def advance(self, sequence: Sequence, row: TokenLogprob, kv: KVManager) -> EndReason | None:
        """The last logits of one beam gave `row`. Once all beams have theirs they go on: those with several
        continuations fork, those with none make place.

        Returns why the search is over, GRAMMAR where that is more than can be followed; None if it goes on.
        """
        if sequence.matcher is not None and sequence.matcher.has_failed:
            return EndReason.GRAMMAR  # `row` holds what it would have forbidden
        self._rows[sequence] = row
        beams = self._search.beams = self._search.beams or [Beam(sequence)]
        if self.has_pending_tokens or any(beam.sequence not in self._rows for beam in beams):
            return None
        rows = [self._rows[beam.sequence] for beam in beams]
        self._rows.clear()
        offers = self._search.rank(rows)
        if not offers:
            return self.answers[0].end if self.answers else EndReason.GRAMMAR
        places = self._places([beams[offer.rank].sequence for offer in offers], kv)
        chosen = list(zip(offers, places, strict=True))
        self._search.beams = [self._search.follow(offer, rows[offer.rank], place) for offer, place in chosen]
        for offer, place in chosen:
            place.token_ids.append(offer.token_id)
            if place.matcher is not None and not place.matcher.advance((offer.token_id,)):
                return EndReason.GRAMMAR
        for unused in [branch for branch in self.live if branch not in places]:
            self._park_behind(places[0], unused)
        return None

    def _places(self, parents: list[Sequence], kv: KVManager) -> list[Sequence]:
        """For each parent, once for each of its continuations, the branch that goes on.

        A parent stays where it is and is forked into the place of one that nobody goes on with.
        """
        free = [branch for branch in self.live if branch not in parents]
        for branch in free:
            kv.release(branch)
        places: list[Sequence] = []
        for parent in parents:
            place = parent
            if parent in places:
                place = free.pop(0)
                place.is_parked = False
                place.token_ids = parent.token_ids[:]
                place.matcher = None if parent.matcher is None else parent.matcher.copy()
                kv.fork(parent, place, parent.num_computed_tokens)
            places.append(place)
        return places

    def _park_behind(self, best: Sequence, unused: Sequence) -> None:
        """Where a grammar allows few tokens there are fewer beams than places. Later there may be more again: until
        then the place waits as one that has all in common with the best beam."""
        unused.token_ids = best.token_ids[:]
        unused.num_inherited_tokens = unused.num_tokens
        unused.is_parked = unused.state is State.RUNNING

    def _num_alternatives(self) -> int:
        return self._search.num_alternatives

    def _past(self) -> tuple[BranchPast, ...]:
        return ()  # beams are told at their end: how far another engine had come with them, nobody knows
