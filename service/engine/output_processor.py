"""What requests are told: a step's tokens and scores, and their ends. Whoever is told an end leaves the engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from service.engine.beam_search import BeamGroup
from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.scheduler import Scheduler
from service.engine.sequence import Sequence, SequenceGroup, State
from service.engine.step import ScoredTokens, StepResult, TokenLogprob
from service.errors import ENDINGS, EndReason


class BranchOutput(NamedTuple):
    """What one branch has to tell: a new token, or its end, or both."""

    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # as many as tokens where the request wants or ranks by them, else none
    end: EndReason | None  # STOP or LENGTH: nothing of this branch follows
    is_prompt: bool = False  # the tokens are the prompt's, behind those told before: all branches have them in common


class Output(NamedTuple):
    """Something a request's sender should hear: news of its branches, or the end, or both."""

    request_id: str
    parts: tuple[BranchOutput, ...]
    end: EndReason | None  # of the whole request: once, in its last output
    choices: tuple[int, ...]  # with an end that is a success: the n branches to answer with, best first
    num_prompt_tokens: int
    num_output_tokens: int  # of all branches
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    embedding: bytes = b""  # float32[H], with an end that is a success, where the request wants the prompt's vector


def output_of(
    group: SequenceGroup,
    parts: tuple[BranchOutput, ...],
    end: EndReason | None = None,
    choices: tuple[int, ...] = (),
    *,
    num_output: int | None = None,
) -> Output:
    """Without `num_output`, it is what the group has now."""
    if num_output is None:
        num_output = group.num_output_tokens
    num_cached = group.num_cached_tokens or 0
    embedding = group.embedding if choices else b""
    return Output(group.request_id, parts, end, choices, group.num_prompt_tokens, num_output, num_cached, embedding)


class NewTokens(NamedTuple):
    """One more token for each of these branches, and nothing else to say of it: most of what a step brings."""

    branches: list[Sequence]
    token_ids: list[int]
    nums_output: list[int]  # tokens of the whole request so far

    def outputs(self) -> list[Output]:
        """The same, one by one."""
        return [
            output_of(branch.group, (BranchOutput(branch.branch, (token_id,), (), None),), num_output=num_output)
            for branch, token_id, num_output in zip(*self, strict=True)
        ]


News = Output | NewTokens


def one_by_one(news: Iterable[News]) -> Iterator[Output]:
    """The same in the same order, an output for each token."""
    for each in news:
        if type(each) is Output:
            yield each
        else:
            yield from each.outputs()


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
