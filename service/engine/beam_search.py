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
from service.engine.request import BranchHistory, EngineRequest
from service.engine.sequence import Sequence, SequenceGroup, SequenceStatus, stop_ids
from service.engine.step import TokenLogprob
from service.errors import EndReason

MAX_PIECE_TOKENS = 1024
"""Tokens of an answer in one piece."""


class AnswerPiece(NamedTuple):
    """A piece of an answer, with its end where it is the last one."""

    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: EndReason | None


class LogprobChain(NamedTuple):
    """The log-probabilities of a beam's tokens, the last one first: beams share what they have in common."""

    last: TokenLogprob
    before: LogprobChain | None


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that goes on; `sum_logprob` is that of its tokens, natural logarithms."""

    sequence: Sequence
    sum_logprob: float = 0.0
    chain: LogprobChain | None = None


class Candidate(NamedTuple):
    """A token that a beam may go on with. Offers sort best first."""

    cost: float  # less is better: the sum of the log-probabilities, negated
    rank: int  # of its beam
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A sequence that has ended; the higher its `score`, the better."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # as many as tokens where they are wanted, else none
    end: EndReason


class BeamSearch:
    """Of one request; `beams` are those that go on, the best first, and `answers` those that ended."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int]):
        """`ends`: the token ids that end an answer."""
        self._params = params
        self._width = params.beam.width
        self._stop_ids = stop_ids
        self.num_alternatives = max(self._width + len(stop_ids), params.logprobs or 0)
        """Of so many best tokens of each beam, no other can be among the next beams or answers, unless more than
        `width` of them complete a grammar: then the next beams are found among these."""
        self.beams: list[Beam] = []
        self.hypotheses: list[BeamHypothesis] = []

    def rank(self, rows: Seq[TokenLogprob]) -> list[Candidate]:
        """What follows the beams, whose last logits gave `rows`: at most `width` offers, the best first.

        Those that end become answers. Nothing follows once the search is over.
        """
        candidates = sorted(
            Candidate(-beam.sum_logprob - logprob, rank, token_id, logprob)
            for rank, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
            if logprob > -math.inf
        )
        num_tokens = self.beams[0].sequence.num_output_tokens + 1
        is_last = num_tokens == self._params.max_tokens
        following: list[Candidate] = []
        for place, candidate in enumerate(candidates):
            if place >= self._width and (is_last or len(following) == self._width):
                break
            may_stop = num_tokens >= self._params.min_tokens
            stops = (may_stop and candidate.token_id in self._stop_ids) or self._completes(candidate)
            if stops or is_last:
                if place < self._width:
                    self._add_hypothesis(
                        candidate, rows[candidate.rank], num_tokens, EndReason.STOP if stops else EndReason.LENGTH
                    )
            elif len(following) < self._width:
                following.append(candidate)
        return [] if self._is_over(following, num_tokens) else following

    def follow(self, candidate: Candidate, row: TokenLogprob, sequence: Sequence) -> Beam:
        """The beam that goes on with the offer, in this sequence."""
        return Beam(sequence, -candidate.cost, self._chain(candidate, row))

    def _completes(self, candidate: Candidate) -> bool:
        """Whether the offer's beam has a grammar in which nothing may follow the token, or that may end before it."""
        matcher = self.beams[candidate.rank].sequence.matcher
        if matcher is None:
            return False
        ahead = matcher.copy()
        if not ahead.advance((candidate.token_id,)):
            return candidate.token_id in self._stop_ids and matcher.is_complete
        return ahead.is_finished

    def _add_hypothesis(self, candidate: Candidate, row: TokenLogprob, num_tokens: int, end: EndReason) -> None:
        sequence = self.beams[candidate.rank].sequence
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        logprobs, chain = [], self._chain(candidate, row)
        while chain is not None:
            logprobs.append(chain.last)
            chain = chain.before
        score = self._score(-candidate.cost, num_tokens)
        self.hypotheses.append(BeamHypothesis(score, (*output, candidate.token_id), tuple(reversed(logprobs)), end))
        self.hypotheses.sort(key=lambda answer: -answer.score)
        del self.hypotheses[self._width :]

    def _chain(self, candidate: Candidate, row: TokenLogprob) -> LogprobChain | None:
        count = self._params.logprobs
        if count is None:
            return None
        told = TokenLogprob(candidate.logprob, row.top_ids[:count], row.top_logprobs[:count])
        return LogprobChain(told, self.beams[candidate.rank].chain)

    def _score(self, sum_logprob: float, num_tokens: int) -> float:
        return sum_logprob / num_tokens**self._params.beam.length_penalty

    def _is_over(self, following: Seq[Candidate], num_tokens: int) -> bool:
        if not following:
            return True
        if len(self.hypotheses) < self._width:
            return False
        beam_params = self._params.beam
        if beam_params.early_stopping is True:
            return True
        if beam_params.early_stopping == "never" and beam_params.length_penalty > 0:
            num_tokens = self._params.max_tokens
        return self._score(-following[0].cost, num_tokens) <= self.hypotheses[-1].score


class BeamGroup(SequenceGroup):
    """A request that searches: its branches are places of beams, as many as the search is wide."""

    def __init__(self, request: EngineRequest, eos_token_ids: frozenset[int]):
        self._search = BeamSearch(request.sampling, stop_ids(request.sampling, eos_token_ids))
        self._rows: dict[Sequence, TokenLogprob] = {}
        super().__init__(request, eos_token_ids)

    @property
    def hypotheses(self) -> list[BeamHypothesis]:
        """Those asked for, the best first: each is a branch to whoever hears of it."""
        return self._search.hypotheses[: self.request.sampling.n]

    def unsent(self) -> list[AnswerPiece]:
        """The answers, piece by piece, less what another engine has told: it found the same."""
        pieces = []
        for branch, answer in enumerate(self.hypotheses):
            history = self.request.history[branch] if branch < len(self.request.history) else BranchHistory()
            if history.end is None:
                length, start = len(answer.token_ids), len(history.token_ids)
                for first in range(start, max(length, start + 1), MAX_PIECE_TOKENS):
                    last = first + MAX_PIECE_TOKENS
                    end = answer.end if last >= length else None
                    pieces.append(AnswerPiece(branch, answer.token_ids[first:last], answer.logprobs[first:last], end))
        return pieces

    def wait_for_leader(self) -> None:
        super().wait_for_leader()
        self._rows.clear()  # they come again: all that waits is computed once more
        if not self._search.beams:
            self.live[0].share_prefix_with([])  # the others fork by rank, once the first logits are known

    def clear_references(self) -> None:
        super().clear_references()
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
        candidates = self._search.rank(rows)
        if not candidates:
            return self.hypotheses[0].end if self.hypotheses else EndReason.GRAMMAR
        places = self._assign_branches([beams[candidate.rank].sequence for candidate in candidates], kv)
        chosen = list(zip(candidates, places, strict=True))
        self._search.beams = [
            self._search.follow(candidate, rows[candidate.rank], place) for candidate, place in chosen
        ]
        for candidate, place in chosen:
            place.token_ids.append(candidate.token_id)
            if place.matcher is not None and not place.matcher.advance((candidate.token_id,)):
                return EndReason.GRAMMAR
        for unused in [branch for branch in self.live if branch not in places]:
            self._wait_behind(places[0], unused)
        return None

    def _assign_branches(self, parents: list[Sequence], kv: KVManager) -> list[Sequence]:
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
                place.is_waiting_for_leader = False
                place.token_ids = parent.token_ids[:]
                place.matcher = None if parent.matcher is None else parent.matcher.copy()
                kv.fork(parent, place, parent.num_computed_tokens)
            places.append(place)
        return places

    def _wait_behind(self, best: Sequence, unused: Sequence) -> None:
        """Where a grammar allows few tokens there are fewer beams than places. Later there may be more again: until
        then the place waits as one that has all in common with the best beam."""
        unused.token_ids = best.token_ids[:]
        unused.num_inherited_tokens = unused.num_tokens
        unused.is_waiting_for_leader = unused.status is SequenceStatus.RUNNING

    def _num_alternatives(self) -> int:
        return self._search.num_alternatives

    def _history(self) -> tuple[BranchHistory, ...]:
        return ()  # beams are told at their end: how far another engine had come with them, nobody knows
