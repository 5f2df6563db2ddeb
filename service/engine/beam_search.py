"""Beam search, with the rules of Hugging Face's `generate`.

1. Candidates rank by summed log-probability, then by their beam's rank, then by token id.
2. A candidate that ends becomes a hypothesis if among the first `width`; the best `width` others are the next beams.
3. A hypothesis scores sum / length ** `length_penalty`; the best `width` are kept.
4. With `width` hypotheses the search ends if `early_stopping` is True, or if the best beam cannot beat the worst
   hypothesis: by its present score, or at full length if "never" and the penalty favours length.

logit_bias, penalties, masks and min_tokens apply to log-probabilities. Temperature, top_k, top_p, min_p and seed are
ignored.
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


class AnswerPiece(NamedTuple):
    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: EndReason | None  # of the last part


class LogprobChain(NamedTuple):
    """Log-probabilities as a linked list, last first: beams share prefixes."""

    last: TokenLogprob
    before: LogprobChain | None


@dataclass(frozen=True, slots=True)
class Beam:
    sequence: Sequence
    sum_logprob: float = 0.0
    chain: LogprobChain | None = None


class Candidate(NamedTuple):
    """Next token of a beam; sorts best first."""

    cost: float  # negated sum
    rank: int  # rank of its beam
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # if requested
    end: EndReason


class BeamSearch:
    def __init__(self, params: SamplingParams, stop_ids: frozenset[int]):
        if params.beam is None:
            raise ValueError("BeamSearch: the request has no beam parameters")
        self._params, self._beam_params = params, params.beam
        self._width = params.beam.width
        self._stop_ids = stop_ids
        self.num_alternatives = max(self._width + len(stop_ids), params.logprobs or 0)
        """Enough unless more than `width` candidates complete a grammar."""
        self.beams: list[Beam] = []
        self.hypotheses: list[BeamHypothesis] = []

    def rank(self, rows: Seq[TokenLogprob]) -> list[Candidate]:
        """Return at most `width` next candidates, best first; none once the search is over."""
        candidates = sorted(
            Candidate(-beam.sum_logprob - logprob, rank, token_id, logprob)
            for rank, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
            if logprob > -math.inf
        )
        num_tokens = self.beams[0].sequence.num_output_tokens + 1
        is_last = num_tokens == self._params.max_tokens
        following: list[Candidate] = []
        for position, candidate in enumerate(candidates):
            if position >= self._width and (is_last or len(following) == self._width):
                break
            may_stop = num_tokens >= self._params.min_tokens
            stops = (may_stop and candidate.token_id in self._stop_ids) or self._completes(candidate)
            if stops or is_last:
                if position < self._width:
                    self._add_hypothesis(
                        candidate, rows[candidate.rank], num_tokens, EndReason.STOP if stops else EndReason.LENGTH
                    )
            elif len(following) < self._width:
                following.append(candidate)
        return [] if self._is_over(following, num_tokens) else following

    def follow(self, candidate: Candidate, row: TokenLogprob, sequence: Sequence) -> Beam:
        return Beam(sequence, -candidate.cost, self._chain(candidate, row))

    def _completes(self, candidate: Candidate) -> bool:
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
        token_logprob = TokenLogprob(candidate.logprob, row.top_ids[:count], row.top_logprobs[:count])
        return LogprobChain(token_logprob, self.beams[candidate.rank].chain)

    def _score(self, sum_logprob: float, num_tokens: int) -> float:
        return sum_logprob / float(num_tokens**self._beam_params.length_penalty)

    def _is_over(self, following: Seq[Candidate], num_tokens: int) -> bool:
        if not following:
            return True
        if len(self.hypotheses) < self._width:
            return False
        beam_params = self._beam_params
        if beam_params.early_stopping is True:
            return True
        if beam_params.early_stopping == "never" and beam_params.length_penalty > 0:
            num_tokens = self._params.max_tokens
        return self._score(-following[0].cost, num_tokens) <= self.hypotheses[-1].score


class BeamGroup(SequenceGroup):
    """Request with one beam per branch."""

    def __init__(self, request: EngineRequest, eos_token_ids: frozenset[int], first_rope_row: int = 0):
        self._search = BeamSearch(request.sampling, stop_ids(request.sampling, eos_token_ids))
        self._rows: dict[Sequence, TokenLogprob] = {}
        super().__init__(request, eos_token_ids, first_rope_row)

    @property
    def hypotheses(self) -> list[BeamHypothesis]:
        """Best `n` hypotheses, best first."""
        return self._search.hypotheses[: self.request.sampling.n]

    def unsent(self) -> list[AnswerPiece]:
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
        self._rows.clear()  # recomputed with the group
        if not self._search.beams:
            self.live[0].share_prefix_with([])  # others fork after the first logits

    def clear_references(self) -> None:
        super().clear_references()
        self._rows.clear()
        self._search.beams = []

    def advance(self, sequence: Sequence, row: TokenLogprob, kv: KVManager) -> EndReason | None:
        """Record a beam's last logits; advance once all beams have theirs. Return why the search is over, or None."""
        if sequence.matcher is not None and sequence.matcher.has_failed:
            return EndReason.GRAMMAR  # `row` was not masked
        self._rows[sequence] = row
        beams = self._search.beams = self._search.beams or [Beam(sequence)]
        if self.has_pending_tokens or any(beam.sequence not in self._rows for beam in beams):
            return None
        rows = [self._rows[beam.sequence] for beam in beams]
        self._rows.clear()
        candidates = self._search.rank(rows)
        if not candidates:
            return self.hypotheses[0].end if self.hypotheses else EndReason.GRAMMAR
        branches = self._assign_branches([beams[candidate.rank].sequence for candidate in candidates], kv)
        chosen = list(zip(candidates, branches, strict=True))
        self._search.beams = [
            self._search.follow(candidate, rows[candidate.rank], branch) for candidate, branch in chosen
        ]
        for candidate, branch in chosen:
            branch.token_ids.append(candidate.token_id)
            if branch.matcher is not None and not branch.matcher.advance((candidate.token_id,)):
                return EndReason.GRAMMAR
        for unused in [branch for branch in self.live if branch not in branches]:
            self._wait_behind(branches[0], unused)
        return None

    def _assign_branches(self, parents: list[Sequence], kv: KVManager) -> list[Sequence]:
        free = [branch for branch in self.live if branch not in parents]
        for branch in free:
            kv.release(branch)
        branches: list[Sequence] = []
        for parent in parents:
            branch = parent
            if parent in branches:
                branch = free.pop(0)
                branch.is_waiting_for_leader = False
                branch.token_ids = parent.token_ids[:]
                branch.matcher = None if parent.matcher is None else parent.matcher.copy()
                kv.fork(parent, branch, parent.num_computed_tokens)
            branches.append(branch)
        return branches

    def _wait_behind(self, best: Sequence, unused: Sequence) -> None:
        """Make an unused branch wait as a copy: a grammar may leave fewer beams than branches."""
        unused.token_ids = best.token_ids[:]
        unused.num_inherited_tokens = unused.num_tokens
        unused.is_waiting_for_leader = unused.status is SequenceStatus.RUNNING

    def _num_alternatives(self) -> int:
        return self._search.num_alternatives

    def _history(self) -> tuple[BranchHistory, ...]:
        return ()  # beams are emitted at their end
