"""What requests are told: a step's tokens and scores, and their ends. Whoever is told an end leaves the engine."""

from __future__ import annotations

import time

from service.engine.beam_search import BeamGroup
from service.engine.kv_manager import KVManager
from service.engine.outputs import BranchOutput, News, NewTokens, output_of
from service.engine.plan import ScoredTokens, StepResult, TokenLogprob
from service.engine.scheduler import Scheduler
from service.engine.sequence import Sequence, SequenceGroup, State
from service.errors import ENDINGS, EndReason


class Answers:
    """Knows the requests that have no end yet, by their ids; each ends once."""

    def __init__(self, scheduler: Scheduler, kv: KVManager):
        self.open: dict[str, SequenceGroup] = {}
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._scheduler = scheduler
        self._kv = kv
        self._news: list[News] = []

    def take_news(self) -> list[News]:
        """Everything since the last call, in order."""
        news, self._news = self._news, []
        return news

    def settle(self, samplers: list[Sequence], result: StepResult) -> None:
        """A step has given these sequences their tokens."""
        for scored in result.scored:
            self._tell_scores(scored)
        for pooled in result.pooled:
            pooled.group.embedding = pooled.vector
        self._settle_tokens(samplers, result)

    def tell(
        self,
        group: SequenceGroup,
        parts: tuple[BranchOutput, ...],
        end: EndReason | None = None,
        choices: tuple[int, ...] = (),
    ) -> None:
        """Say this of a request."""
        self._news.append(output_of(group, parts, end, choices))

    def end_branch(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: EndReason,
        *,
        is_told: bool = False,
    ) -> None:
        """The branch is done, and with the last of them the request."""
        group, sequence.end = sequence.group, reason
        self._scheduler.remove(sequence)
        parts = () if is_told else (BranchOutput(sequence.branch, tokens, logprobs, reason),)
        if group.live:
            if parts:
                self.tell(group, parts)
            return
        choices = group.choices()
        end = group.branches[choices[0]].end if choices else reason
        self._tell_end(group, parts, end, choices)

    def end_group(self, group: SequenceGroup, reason: EndReason) -> None:
        """All that is left of the request ends now."""
        parts = []
        for sequence in reversed(group.live):
            self._scheduler.remove(sequence)
            sequence.end = reason
            parts.append(BranchOutput(sequence.branch, (), (), reason))
        if ENDINGS[reason].finish_reason is None:
            self._tell_end(group, (), reason)
        else:
            self._tell_end(group, tuple(reversed(parts)), reason, group.choices())

    def _settle_tokens(self, samplers: list[Sequence], result: StepResult) -> None:
        """Each sampler gets its token. What most of them get is told together, before what is to be said of others."""
        branches, token_ids, nums_output = told = NewTokens([], [], [])
        first_place = len(self._news)
        for place, (sequence, token_id) in enumerate(zip(samplers, result.token_ids, strict=True)):
            sequence.num_pending_tokens -= 1
            if sequence.state is State.ENDED:
                continue
            group = sequence.group
            if not group.has_sampled:
                group.has_sampled = True
                self.num_prompt_tokens += group.num_prompt_tokens
                if group.request.times is not None:
                    group.request.times.first_token_s = time.time()
            if (
                sequence.is_plain
                and len(sequence.token_ids) + 1 < sequence.max_num_tokens
                and token_id not in group.stop_ids
                and place not in result.failed
            ):
                sequence.token_ids.append(token_id)
                group.num_output_tokens += 1
                branches.append(sequence)
                token_ids.append(token_id)
                nums_output.append(group.num_output_tokens)
            elif place in result.failed:
                self.end_group(group, EndReason.NUMERICAL_ERROR)
            else:
                self._settle(sequence, token_id, None if result.logprobs is None else result.logprobs[place])
        if branches:
            self._news.insert(first_place, told)
            self.num_output_tokens += len(branches)

    def _tell_scores(self, scored: ScoredTokens) -> None:
        group = scored.score.chunk.sequence.group
        if group.live:
            stop = scored.first + len(scored.logprobs)
            token_ids = group.request.prompt[scored.first : stop]
            self.tell(group, (BranchOutput(0, token_ids, scored.logprobs, None, is_prompt=True),))

    def _settle(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        group = sequence.group
        if isinstance(group, BeamGroup):
            self._settle_beam(group, sequence, logprob)
            return
        self.num_output_tokens += 1
        reason = group.append(sequence, token_id, 0.0 if logprob is None else logprob.logprob)
        logprobs = () if logprob is None else (logprob,)
        if reason is EndReason.GRAMMAR:
            self.end_group(group, reason)
        elif reason is None:
            self.tell(group, (BranchOutput(sequence.branch, (token_id,), logprobs, None),))
        else:
            self.end_branch(sequence, (token_id,), logprobs, reason)

    def _settle_beam(self, group: BeamGroup, sequence: Sequence, row: TokenLogprob) -> None:
        """Once the search is over, the answers are told."""
        reason = group.advance(sequence, row, self._kv)
        if reason is None:
            return
        if reason is EndReason.GRAMMAR:
            self.end_group(group, reason)
            return
        for branch in reversed(group.live):
            self._scheduler.remove(branch)
        group.num_output_tokens = sum(len(answer.token_ids) for answer in group.answers)
        self.num_output_tokens += group.num_output_tokens
        *pieces, last = [(BranchOutput(*piece),) for piece in group.untold()] or [()]
        for piece in pieces:
            self.tell(group, piece)
        self._tell_end(group, last, group.answers[0].end, tuple(range(len(group.answers))))

    def _tell_end(
        self, group: SequenceGroup, parts: tuple[BranchOutput, ...], end: EndReason, choices: tuple[int, ...] = ()
    ) -> None:
        del self.open[group.request_id]
        self.tell(group, parts, end, choices)
        group.part()
