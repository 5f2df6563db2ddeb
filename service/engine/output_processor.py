"""What requests are told: a step's tokens and scores, and their ends. Whoever is told an end leaves the engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from service.engine.beam_search import BeamGroup
from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.scheduler import Scheduler
from service.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from service.engine.step import PromptLogprobs, StepResult, TokenLogprob
from service.errors import ENDINGS, EndReason


class BranchOutput(NamedTuple):
    """What one branch has to tell: a new token, or its end, or both."""

    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # as many as tokens where the request wants or ranks by them, else none
    end: EndReason | None  # STOP or LENGTH: nothing of this branch follows
    is_prompt: bool = False  # the tokens are the prompt's, behind those told before: all branches have them in common


class RequestOutput(NamedTuple):
    """Something a request's sender should hear: news of its branches, or the end, or both."""

    request_id: str
    parts: tuple[BranchOutput, ...]
    end: EndReason | None  # of the whole request: once, in its last output
    choices: tuple[int, ...]  # with an end that is a success: the n branches to answer with, best first
    num_prompt_tokens: int
    num_output_tokens: int  # of all branches
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    embedding: bytes = b""  # float32[H], with an end that is a success, where the request wants the prompt's vector


def request_output(
    group: SequenceGroup,
    parts: tuple[BranchOutput, ...],
    end: EndReason | None = None,
    choices: tuple[int, ...] = (),
    *,
    num_output: int | None = None,
) -> RequestOutput:
    """Without `num_output`, it is what the group has now."""
    if num_output is None:
        num_output = group.num_output_tokens
    num_cached = group.num_cached_tokens or 0
    embedding = group.embedding if choices else b""
    return RequestOutput(
        group.request_id, parts, end, choices, group.num_prompt_tokens, num_output, num_cached, embedding
    )


class NewTokens(NamedTuple):
    """One more token for each of these branches, and nothing else to say of it: most of what a step brings."""

    branches: list[Sequence]
    token_ids: list[int]
    nums_output_tokens: list[int]  # tokens of the whole request so far

    def outputs(self) -> list[RequestOutput]:
        """The same, one by one."""
        return [
            request_output(branch.group, (BranchOutput(branch.branch, (token_id,), (), None),), num_output=num_output)
            for branch, token_id, num_output in zip(*self, strict=True)
        ]


EngineOutput = RequestOutput | NewTokens


def iter_request_outputs(outputs: Iterable[EngineOutput]) -> Iterator[RequestOutput]:
    """The same in the same order, an output for each token."""
    for each in outputs:
        if type(each) is RequestOutput:
            yield each
        else:
            yield from each.outputs()


class OutputProcessor:
    """Knows the requests that have no end yet, by their ids; each ends once."""

    def __init__(self, scheduler: Scheduler, kv: KVManager):
        self.open_groups: dict[str, SequenceGroup] = {}
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._scheduler = scheduler
        self._kv = kv
        self._outputs: list[EngineOutput] = []

    def drain_outputs(self) -> list[EngineOutput]:
        """Everything since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def process_step(self, samplers: list[Sequence], result: StepResult) -> None:
        """A step has given these sequences their tokens."""
        for scored in result.prompt_logprobs:
            self._emit_prompt_logprobs(scored)
        for pooled in result.pooled:
            pooled.group.embedding = pooled.vector
        self._append_tokens(samplers, result)

    def emit(
        self,
        group: SequenceGroup,
        parts: tuple[BranchOutput, ...],
        end: EndReason | None = None,
        choices: tuple[int, ...] = (),
    ) -> None:
        """Say this of a request."""
        self._outputs.append(request_output(group, parts, end, choices))

    def end_branch(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: EndReason,
        *,
        already_sent: bool = False,
    ) -> None:
        """The branch is done, and with the last of them the request."""
        group, sequence.end = sequence.group, reason
        self._scheduler.remove_sequence(sequence)
        parts = () if already_sent else (BranchOutput(sequence.branch, tokens, logprobs, reason),)
        if group.live:
            if parts:
                self.emit(group, parts)
            return
        choices = group.choices()
        end = group.branches[choices[0]].end if choices else reason
        self._emit_end(group, parts, end, choices)

    def end_group(self, group: SequenceGroup, reason: EndReason) -> None:
        """All that is left of the request ends now."""
        parts = []
        for sequence in reversed(group.live):
            self._scheduler.remove_sequence(sequence)
            sequence.end = reason
            parts.append(BranchOutput(sequence.branch, (), (), reason))
        if ENDINGS[reason].finish_reason is None:
            self._emit_end(group, (), reason)
        else:
            self._emit_end(group, tuple(reversed(parts)), reason, group.choices())

    def _append_tokens(self, samplers: list[Sequence], result: StepResult) -> None:
        """Each sampler gets its token. What most of them get is told together, before what is to be said of others."""
        branches, token_ids, nums_output_tokens = told = NewTokens([], [], [])
        first_index = len(self._outputs)
        for place, (sequence, token_id) in enumerate(zip(samplers, result.token_ids, strict=True)):
            sequence.num_pending_tokens -= 1
            if sequence.status is SequenceStatus.ENDED:
                continue
            group = sequence.group
            if not group.has_sampled:
                group.has_sampled = True
                self.num_prompt_tokens += group.num_prompt_tokens
                if group.request.times is not None:
                    group.request.times.first_token_s = time.time()
            if (
                sequence.emits_only_tokens
                and len(sequence.token_ids) + 1 < sequence.max_num_tokens
                and token_id not in group.stop_ids
                and place not in result.failed
            ):
                sequence.token_ids.append(token_id)
                group.num_output_tokens += 1
                branches.append(sequence)
                token_ids.append(token_id)
                nums_output_tokens.append(group.num_output_tokens)
            elif place in result.failed:
                self.end_group(group, EndReason.NUMERICAL_ERROR)
            else:
                self._append_token(sequence, token_id, None if result.logprobs is None else result.logprobs[place])
        if branches:
            self._outputs.insert(first_index, told)
            self.num_output_tokens += len(branches)

    def _emit_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        group = scored.span.chunk.sequence.group
        if group.live:
            stop = scored.first + len(scored.logprobs)
            token_ids = group.request.prompt[scored.first : stop]
            self.emit(group, (BranchOutput(0, token_ids, scored.logprobs, None, is_prompt=True),))

    def _append_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        group = sequence.group
        if isinstance(group, BeamGroup):
            self._advance_beams(group, sequence, logprob)
            return
        self.num_output_tokens += 1
        reason = group.append(sequence, token_id, 0.0 if logprob is None else logprob.logprob)
        logprobs = () if logprob is None else (logprob,)
        if reason is EndReason.GRAMMAR:
            self.end_group(group, reason)
        elif reason is None:
            self.emit(group, (BranchOutput(sequence.branch, (token_id,), logprobs, None),))
        else:
            self.end_branch(sequence, (token_id,), logprobs, reason)

    def _advance_beams(self, group: BeamGroup, sequence: Sequence, row: TokenLogprob) -> None:
        """Once the search is over, the answers are told."""
        reason = group.advance(sequence, row, self._kv)
        if reason is None:
            return
        if reason is EndReason.GRAMMAR:
            self.end_group(group, reason)
            return
        for branch in reversed(group.live):
            self._scheduler.remove_sequence(branch)
        group.num_output_tokens = sum(len(answer.token_ids) for answer in group.hypotheses)
        self.num_output_tokens += group.num_output_tokens
        *pieces, last = [(BranchOutput(*piece),) for piece in group.unsent()] or [()]
        for piece in pieces:
            self.emit(group, piece)
        self._emit_end(group, last, group.hypotheses[0].end, tuple(range(len(group.hypotheses))))

    def _emit_end(
        self, group: SequenceGroup, parts: tuple[BranchOutput, ...], end: EndReason, choices: tuple[int, ...] = ()
    ) -> None:
        del self.open_groups[group.request_id]
        self.emit(group, parts, end, choices)
        group.clear_references()
