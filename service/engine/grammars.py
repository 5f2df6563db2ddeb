from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from model.errors import GrammarError
from model.ops.interface import TokenMask
from model.sampling_params import SamplingParams
from model.text.grammar_matcher import GrammarCompiler, Matcher, num_mask_words
from model.text.token_rules import RulesMatcher
from service.engine.compile_threads import CompileCall, CompileThreads
from service.engine.sequence import Sequence, SequenceGroup, SequenceStatus

AnyMatcher = Matcher | RulesMatcher

NUM_COMPILING_THREADS = 2
MAX_COMPILE_S = 30.0
"""Limit per grammar; the gateway compiled it in 2 s."""
MAX_FILLING_THREADS = 8
MASKS_PER_THREAD = 4
"""Fewer masks are filled faster than a thread wakes."""


class Grammars:
    """Compiler of grammars; a bad grammar fails only its request."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]):
        """`make_compiler` runs on a thread and may raise GrammarError."""
        self._threads = CompileThreads(NUM_COMPILING_THREADS)
        self._compiler: Future[GrammarCompiler] = self._threads.submit(make_compiler).future
        self._ready_at_s = time.monotonic()
        self._compiler.add_done_callback(self._note_ready)
        self._compiling: dict[SequenceGroup, CompileCall] = {}

    def start_compiling(self, group: SequenceGroup) -> None:
        group.is_compiled = False
        outputs = [
            [] if sequence.status is SequenceStatus.ENDED else sequence.token_ids[sequence.num_prompt_tokens :].tolist()
            for sequence in group.branches
        ]
        self._compiling[group] = self._threads.submit(self._matchers, group.request.sampling, outputs)

    def drain_ready(self) -> list[tuple[SequenceGroup, bool]]:
        """Return newly compiled groups, and whether each has matchers."""
        ready = []
        for group, call in list(self._compiling.items()):
            is_done = call.future.done()
            if is_done or self._is_lost(call):
                del self._compiling[group]
                if not is_done:
                    self._threads.give_up(call)
                matchers = _result(call.future) if is_done else []
                group.is_compiled = True
                for sequence, matcher in zip(group.branches, matchers, strict=False):
                    sequence.matcher = matcher
                ready.append((group, bool(matchers)))
        return ready

    def wait(self, timeout_s: float) -> None:
        if self._compiling:
            wait([call.future for call in self._compiling.values()], timeout_s, FIRST_COMPLETED)

    def _is_lost(self, call: CompileCall) -> bool:
        ready_for_s = time.monotonic() - self._ready_at_s if self._compiler.done() else 0.0
        return min(ready_for_s, call.runs_for_s()) > MAX_COMPILE_S

    def _note_ready(self, _: Future[GrammarCompiler]) -> None:
        self._ready_at_s = time.monotonic()

    def _matchers(self, params: SamplingParams, outputs: list[list[int]]) -> list[AnyMatcher]:
        compiler = self._compiler.result()
        inner = None if params.grammar is None else compiler.compile(params.grammar)
        first: AnyMatcher | None = inner
        if params.rules is not None:
            first = RulesMatcher(params.rules, compiler.pieces, inner)
        assert first is not None
        matchers = [first.copy() for _ in outputs[1:]] + [first]
        for matcher, output in zip(matchers, outputs, strict=True):
            if output and not matcher.is_finished and not matcher.advance(output):
                raise GrammarError("history: its tokens do not match the grammar.")
        return matchers


class MaskBuilder:
    """Builder of token masks, on several threads without the GIL."""

    def __init__(self, vocab_size: int):
        self._num_words = num_mask_words(vocab_size)
        self._num_threads = max(1, min(MAX_FILLING_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")

    def build(self, sequences: Iterable[Sequence]) -> TokenMask | None:
        """Return host masks; None without grammars."""
        rows: list[int] = []
        masked: list[tuple[AnyMatcher, frozenset[int]]] = []
        for sequence in sequences:
            matcher = None if sequence.status is SequenceStatus.ENDED else sequence.matcher
            rows.append(-1 if matcher is None else len(masked))
            if matcher is not None:
                masked.append((matcher, sequence.group.stop_ids))
        if not masked:
            return None
        words = np.empty((len(masked), self._num_words), np.uint32)

        def fill(part: range) -> None:
            for row in part:
                matcher, stop_ids = masked[row]
                matcher.fill_mask(words[row], stop_ids)

        num_parts = min(self._num_threads, -(-len(masked) // MASKS_PER_THREAD))
        parts = [range(first, len(masked), num_parts) for first in range(num_parts)]
        others = [self._pool.submit(fill, part) for part in parts[1:]]
        fill(parts[0])
        for other in others:
            other.result()
        return TokenMask(np.array(rows, np.int32), words)

    def build_runs(self, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> tuple[TokenMask | None, frozenset[int]]:
        """Return the mask of each row after its `drafts`, and the rows whose matcher failed. Rows of a run are
        adjacent, each with one more draft."""
        rows: list[int] = []
        words: list[np.ndarray] = []
        failed = set()
        walker: AnyMatcher | None = None
        for row, (sequence, before) in enumerate(zip(sequences, drafts, strict=True)):
            own = None if sequence.status is SequenceStatus.ENDED else sequence.matcher
            if own is None:
                rows.append(-1)
                continue
            if not before:
                walker = own
            else:
                walker = own.copy() if walker is own or walker is None else walker
                walker.advance(before[-1:])
            rows.append(len(words))
            words.append(np.empty(self._num_words, np.uint32))
            if not walker.fill_mask(words[-1], sequence.group.stop_ids) and before:
                failed.add(row)
        return (TokenMask(np.array(rows, np.int32), np.stack(words)) if words else None), frozenset(failed)


def _result(future: Future[list[AnyMatcher]]) -> list[AnyMatcher]:
    try:
        return future.result()
    except GrammarError:
        return []
