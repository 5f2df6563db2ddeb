"""Who gets a token from a step's logits, and how: what sampling needs goes to the device, and the tokens come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from model.llama import Llama
from model.ops.interface import Array, SamplingArrays
from model.sampler import SampledRows, sampling_arrays
from service.engine.execution.decode_batch import Arranged
from service.engine.grammars import MaskBuilder
from service.engine.sequence import Sequence
from service.engine.step import StepResult, TokenLogprob


@dataclass(slots=True, eq=False)
class Due:
    """The sequences that get a token from a step's logits, in the order of its rows."""

    samplers: list[Sequence]
    rows: list[int]  # of the logits, for each sampler
    positions: np.ndarray  # int32, where the tokens will stand
    num_in_own_rows: int  # so many of the first get their tokens in the rows that they have as decodes
    places: np.ndarray  # int64, where each of the plan's samplers stands in `samplers`
    is_late: bool = False  # somebody's token cannot be drawn before the tokens of the step before are known
    is_shaped: bool = False  # somebody's penalties, biases or minimum length have a say
    is_scored: bool = False  # somebody's log-probabilities are of adjusted logits
    kept: SamplingArrays | None = None  # good for the next step too

    def __post_init__(self):
        self.is_late = any(map(attrgetter("draws_late"), self.samplers))
        self.is_shaped = any(map(attrgetter("is_shaped"), self.samplers))
        self.is_scored = any(map(attrgetter("scores_adjusted"), self.samplers))

    @property
    def is_one_each(self) -> bool:
        """Whether every row of the logits has one sampler."""
        return not self.rows or self.rows[-1] + 1 == len(self.rows)


class Draw(NamedTuple):
    """Sequences that get their tokens from one call of `Ops.sample`, and what waits for its arrays."""

    samplers: list[Sequence]
    arrive: Callable[[], list[np.ndarray]]


class Drawer:
    """Draws for one step after the other. What a step samples stays in `sampled` for the next one, whose host side
    needs only to know from which row: for most decodes from their own, for the others as `elsewhere` says."""

    def __init__(self, model: Llama, eos_token_ids: frozenset[int], max_rows: int):
        self.sampled = model.ops.empty((max_rows,), np.dtype(np.int32))
        self.elsewhere: dict[Sequence, int] = {}
        self._ops = model.ops
        self._vocab_size = model.config.vocab_size
        self._eos_token_ids = eos_token_ids
        self._masks = MaskBuilder(model.config.vocab_size)
        self._last: Due | None = None  # of decodes alone

    def due(self, arranged: Arranged) -> Due:
        """For whom to draw. As long as the same sequences decode, and nothing else happens, it is the same object."""
        if not arranged.is_plain:
            return _due_of_any(arranged)
        if arranged.longer:
            return _due_of_plain(arranged)
        if self._last is None or self._last.samplers is not arranged.decodes:
            self._last = _due_of_plain(arranged)
        self._last.positions = arranged.inputs.context_lens
        return self._last

    def draw(self, logits: Array, due: Due, context_lens: Array | None, *, masked: bool) -> list[Draw]:
        """Sample from logits [R, V]. `context_lens` int32[R]: those of the rows, where the next step has its own in the
        same memory.

        Beams whose log-probabilities are of adjusted logits are a draw of their own, behind the one whose tokens the
        next step may need before the host knows them.
        """
        if due.is_one_each and not due.is_scored:
            draws = [self._draw(logits, due, context_lens, masked=masked)]
        else:
            draws = self._draws(logits, due, masked)
        num_own = due.num_in_own_rows if draws[0].samplers is due.samplers else 0
        self.elsewhere = {sequence: row for row, sequence in enumerate(draws[0].samplers[num_own:], num_own)}
        return draws

    def _draws(self, logits: Array, due: Due, masked: bool) -> list[Draw]:
        scored = [place for place, sequence in enumerate(due.samplers) if sequence.scores_adjusted]
        plain = sorted(set(range(len(due.samplers))) - set(scored))
        draws = []
        for places, adjusted in ((plain, False), (scored, True)):
            if places:
                picked = self._ops.upload(np.array([due.rows[place] for place in places], np.int32))
                own = self._ops.gather_rows(logits, picked)
                samplers, every = [due.samplers[place] for place in places], list(range(len(places)))
                part = Due(samplers, every, due.positions[places], 0, np.array(every))
                draws.append(self._draw(own, part, None, masked=masked, adjusted=adjusted))
        return draws

    def _draw(
        self, logits: Array, due: Due, context_lens: Array | None, *, masked: bool, adjusted: bool = False
    ) -> Draw:
        samplers = due.samplers
        if not samplers:
            return Draw(samplers, self._ops.download_later(()))
        how = None if context_lens is None else due.kept
        if how is None:
            how = self._how(due, masked, adjusted)
            if context_lens is not None and not (due.is_late or due.is_shaped):
                due.kept = replace(how, position=context_lens.view(np.uint32))
        sampled = self._ops.sample(logits, how, out=None if adjusted else self.sampled[: len(samplers)])
        arrays = [sampled.token_ids, sampled.is_nan]
        if sampled.logprobs is not None:
            arrays += [sampled.logprobs, sampled.top_ids, sampled.top_logprobs]
        return Draw(samplers, self._ops.download_later(arrays))

    def _how(self, due: Due, masked: bool, adjusted: bool) -> SamplingArrays:
        shaped = due.samplers if due.is_shaped else []
        rows = SampledRows(
            records=[sequence.sampling_record for sequence in due.samplers],
            positions=due.positions.astype(np.uint32),
            sampling=[sequence.sampling for sequence in shaped],
            seen=[sequence.seen_tokens() for sequence in shaped],
            num_prompt_tokens=[sequence.num_prompt_tokens for sequence in shaped],
            mask=self._masks.build(due.samplers) if masked else None,
        )
        send = self._ops.upload_all
        return sampling_arrays(rows, self._vocab_size, self._eos_token_ids, send, adjusts_logprobs=adjusted)


def result_of(draws: list[Draw], due: Due) -> StepResult:
    """Waits for them. The tokens in the order of the plan's samplers."""
    if len(draws) == 1:
        return _result(due.samplers, draws[0].arrive(), due.places)
    results = [_result(samplers, arrive(), np.arange(len(samplers))) for samplers, arrive in draws]
    drawn = chain.from_iterable(draw.samplers for draw in draws)
    told = chain.from_iterable(result.one_by_one() for result in results)
    tokens = dict(zip(drawn, told, strict=True))
    return StepResult.of(tokens[due.samplers[place]] for place in due.places)


def _due_of_plain(arranged: Arranged) -> Due:
    """Each decode gets the next of its own tokens."""
    decodes, inputs = arranged.decodes, arranged.inputs
    tails = [chunk for chunk in arranged.longer if chunk.samplers]
    count = len(decodes)
    others = [(sampler, row, chunk.end) for row, chunk in enumerate(tails, count) for sampler in chunk.samplers]
    samplers, rows, ends = zip(*others, strict=True) if others else ((), (), ())
    return Due(
        samplers=[*decodes, *samplers] if others else decodes,
        rows=[*range(count), *rows],
        positions=np.append(inputs.context_lens[:count], np.array(ends, np.int32)),
        num_in_own_rows=count,
        places=np.append(arranged.row_of_decode, np.arange(count, count + len(others))),
    )


def _due_of_any(arranged: Arranged) -> Due:
    """Some decodes get no token yet, or others get theirs from the same logits."""
    chunks = [chunk for chunk in arranged.chunks if chunk.samplers]
    samplers = [sampler for chunk in chunks for sampler in chunk.samplers]
    place_of = {sampler: place for place, sampler in enumerate(samplers)}
    return Due(
        samplers=samplers,
        rows=[row for row, chunk in enumerate(chunks) for _ in chunk.samplers],
        positions=np.array([chunk.end for chunk in chunks for _ in chunk.samplers], np.int32),
        num_in_own_rows=0,
        places=np.array([place_of[sampler] for sampler in arranged.plan.samplers], np.int64),
    )


def _result(samplers: list[Sequence], arrays: list[np.ndarray], places: np.ndarray) -> StepResult:
    """Of one draw's rows at these places: (token ids, is NaN), and log-probabilities where anybody wants some."""
    if not samplers:
        return StepResult(())
    token_ids, is_nan, *logprobs = (array[places] for array in arrays)
    told = (
        _logprobs([samplers[place] for place in places], *(array.tolist() for array in logprobs)) if logprobs else None
    )
    return StepResult(token_ids.tolist(), told, frozenset(np.flatnonzero(is_nan).tolist()))


def _logprobs(samplers: list[Sequence], chosen: list, top_ids: list, top: list) -> list[TokenLogprob | None]:
    wanted = [sequence.num_alternatives for sequence in samplers]
    return [
        None if count is None else TokenLogprob(chosen[row], tuple(top_ids[row][:count]), tuple(top[row][:count]))
        for row, count in enumerate(wanted)
    ]
