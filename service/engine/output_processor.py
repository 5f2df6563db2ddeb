from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

from service.engine.beam_search import BeamGroup
from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.scheduler import Scheduler
from service.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from service.engine.step import PromptLogprobs, StepResult, TokenLogprob
from service.errors import ENDINGS, EndReason


class BranchOutput(NamedTuple):
    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # one per token, or none
    end: EndReason | None  # STOP or LENGTH: complete
    is_prompt: bool = False  # shared by all branches


class RequestOutput(NamedTuple):
    request_id: str
    parts: tuple[BranchOutput, ...]
    end: EndReason | None  # in the last output
    choices: tuple[int, ...]  # on success: n branches, best first
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    embedding: bytes = b""  # float32[H], on success
    num_drafts: int = 0  # verified draft tokens
    num_accepted_drafts: int = 0


def request_output(
    group: SequenceGroup,
    parts: tuple[BranchOutput, ...],
    end: EndReason | None = None,
    choices: tuple[int, ...] = (),
    *,
    num_output: int | None = None,
) -> RequestOutput:
    if num_output is None:
        num_output = group.num_output_tokens
    num_cached = group.num_cached_tokens or 0
    embedding = group.embedding if choices else b""
    return RequestOutput(
        group.request_id,
        parts,
        end,
        choices,
        group.num_prompt_tokens,
        num_output,
        num_cached,
        embedding,
        group.num_draft_tokens,
        group.num_accepted_tokens,
    )


class NewTokens(NamedTuple):
    """Plain tokens, one per branch: most of a step's outputs."""

    branches: list[Sequence]
    token_ids: list[int]
    nums_output_tokens: list[int]  # of the request

    def outputs(self) -> list[RequestOutput]:
        return [
            request_output(branch.group, (BranchOutput(branch.branch, (token_id,), (), None),), num_output=num_output)
            for branch, token_id, num_output in zip(*self, strict=True)
        ]


EngineOutput = RequestOutput | NewTokens


def iter_request_outputs(outputs: Iterable[EngineOutput]) -> Iterator[RequestOutput]:
    for each in outputs:
        if isinstance(each, RequestOutput):
            yield each
        else:
            yield from each.outputs()


class OutputProcessor:
    """Open requests by id; each ends exactly once."""

    def __init__(self, scheduler: Scheduler, kv: KVManager):
        self.open_groups: dict[str, SequenceGroup] = {}
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._scheduler = scheduler
        self._kv = kv
        self._outputs: list[EngineOutput] = []

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def drain_outputs(self) -> list[EngineOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def process_step(self, sequences: list[Sequence], result: StepResult) -> None:
        for scored in result.prompt_logprobs:
            self._emit_prompt_logprobs(scored)
        for pooled in result.pooled:
            pooled.group.embedding = pooled.vector
        if result.indptr is None:
            self._append_tokens(sequences, result)
        else:
            self._append_runs(sequences, result, result.indptr)

    def emit(
        self,
        group: SequenceGroup,
        parts: tuple[BranchOutput, ...],
        end: EndReason | None = None,
        choices: tuple[int, ...] = (),
    ) -> None:
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
        """End a branch, and the request with its last branch."""
        group, sequence.end = sequence.group, reason
        self._scheduler.remove_sequence(sequence)
        parts = () if already_sent else (BranchOutput(sequence.branch, tokens, logprobs, reason),)
        if group.live:
            if parts:
                self.emit(group, parts)
            return
        choices = group.choices()
        end = (group.branches[choices[0]].end if choices else None) or reason
        self._emit_end(group, parts, end, choices)

    def end_group(self, group: SequenceGroup, reason: EndReason) -> None:
        parts = []
        for sequence in reversed(group.live):
            self._scheduler.remove_sequence(sequence)
            sequence.end = reason
            parts.append(BranchOutput(sequence.branch, (), (), reason))
        if ENDINGS[reason].finish_reason is None:
            self._emit_end(group, (), reason)
        else:
            self._emit_end(group, tuple(reversed(parts)), reason, group.choices())

    def _append_tokens(self, sequences: list[Sequence], result: StepResult) -> None:
        """Append one token each; plain tokens are emitted together, first."""
        branches, token_ids, nums_output_tokens = new_tokens = NewTokens([], [], [])
        first_index = len(self._outputs)
        for index, (sequence, token_id) in enumerate(zip(sequences, result.token_ids, strict=True)):
            sequence.num_pending_tokens -= 1
            if sequence.status is SequenceStatus.ENDED:
                continue
            group = sequence.group
            if not group.has_sampled:
                self._mark_sampled(group)
            if (
                sequence.emits_only_tokens
                and len(sequence.token_ids) + 1 < sequence.max_num_tokens
                and token_id not in group.stop_ids
                and index not in result.failed
            ):
                sequence.token_ids.append(token_id)
                group.num_output_tokens += 1
                branches.append(sequence)
                token_ids.append(token_id)
                nums_output_tokens.append(group.num_output_tokens)
            elif index in result.failed:
                self.end_group(group, EndReason.NUMERICAL_ERROR)
            else:
                self._append_token(sequence, token_id, None if result.logprobs is None else result.logprobs[index])
        if branches:
            self._outputs.insert(first_index, new_tokens)
            self.num_output_tokens += len(branches)

    def _append_runs(self, sequences: list[Sequence], result: StepResult, indptr: Seq[int]) -> None:
        for index, sequence in enumerate(sequences):
            sequence.num_pending_tokens -= 1
            if sequence.status is SequenceStatus.ENDED:
                continue
            if index in result.failed:
                self.end_group(sequence.group, EndReason.NUMERICAL_ERROR)
                continue
            run = range(indptr[index], indptr[index + 1])
            if run and self._append_plain_run(sequence, tuple(result.token_ids[run.start : run.stop])):
                continue
            if not run:
                self._kv.retract_token(sequence)
            elif not sequence.group.has_sampled:
                self._mark_sampled(sequence.group)
            if len(run) == 1:
                logprob = None if result.logprobs is None else result.logprobs[run.start]
                self._append_token(sequence, result.token_ids[run.start], logprob)
            elif run:
                self._append_run(sequence, result, run)

    def _append_plain_run(self, sequence: Sequence, token_ids: tuple[int, ...]) -> bool:
        """Append a run that ends nothing, with few calls as the next step waits. Return False for other runs."""
        group, known = sequence.group, sequence.token_ids
        if (
            not sequence.emits_only_tokens
            or len(known) + len(token_ids) >= sequence.max_num_tokens
            or not group.stop_ids.isdisjoint(token_ids)
        ):
            return False
        if not group.has_sampled:
            self._mark_sampled(group)
        known.extend(token_ids)
        self._kv.accept_drafts(sequence, len(token_ids) - 1)
        group.num_output_tokens += len(token_ids)
        self.num_output_tokens += len(token_ids)
        self.emit(group, (BranchOutput(sequence.branch, token_ids, (), None),))
        return True

    def _append_run(self, sequence: Sequence, result: StepResult, run: range) -> None:
        """Append tokens until the branch ends."""
        group, reason = sequence.group, None
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for position in run:
            if token_ids:
                self._kv.accept_drafts(sequence, 1)
            logprob = None if result.logprobs is None else result.logprobs[position]
            reason = group.append(sequence, result.token_ids[position], 0.0 if logprob is None else logprob.logprob)
            self.num_output_tokens += 1
            if reason is EndReason.GRAMMAR:
                break
            token_ids.append(result.token_ids[position])
            logprobs += () if logprob is None else (logprob,)
            if reason is not None:
                break
        if reason is not None and reason is not EndReason.GRAMMAR:
            self.end_branch(sequence, tuple(token_ids), tuple(logprobs), reason)
            return
        if token_ids:
            self.emit(group, (BranchOutput(sequence.branch, tuple(token_ids), tuple(logprobs), None),))
        if reason is not None:
            self.end_group(group, reason)

    def _mark_sampled(self, group: SequenceGroup) -> None:
        group.has_sampled = True
        self.num_prompt_tokens += group.num_prompt_tokens
        if group.request.times is not None:
            group.request.times.first_token_s = time.time()

    def _emit_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        group = scored.span.chunk.sequence.group
        if group.live:
            stop = scored.first + len(scored.logprobs)
            token_ids = group.request.prompt[scored.first : stop]
            self.emit(group, (BranchOutput(0, token_ids, scored.logprobs, None, is_prompt=True),))

    def _append_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        group = sequence.group
        if isinstance(group, BeamGroup):
            if logprob is None:
                raise AssertionError(f"{group.request_id}: a beam got no log-probabilities")
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
        parts = [BranchOutput(*piece) for piece in group.unsent()]
        for part in parts[:-1]:
            self.emit(group, (part,))
        self._emit_end(group, tuple(parts[-1:]), group.hypotheses[0].end, tuple(range(len(group.hypotheses))))

    def _emit_end(
        self, group: SequenceGroup, parts: tuple[BranchOutput, ...], end: EndReason, choices: tuple[int, ...] = ()
    ) -> None:
        del self.open_groups[group.request_id]
        if group.request.times is not None:
            group.request.times.ended_s = time.time()
        self.emit(group, parts, end, choices)
        group.clear_references()
