"""Who computes how many tokens in the next step.

There is no prefill phase: a step has a budget of tokens, sequences that lack one token (decodes) are served first, then
those that lack many, oldest first, each with what the budget leaves. While others decode, prompts get a smaller budget,
for every decode waits for the whole step; but the more of them wait, the larger it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from service.engine.kv_manager import KVManager
from service.engine.plan import Chunk, StepPlan
from service.engine.preemption import Preemption
from service.engine.sequence import Sequence, State


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a step and of a sequence, in tokens and sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int  # prompt tokens of a step that also decodes, for each prompt that is not done
    max_model_len: int


class Scheduler:
    """Owns the two queues. `running` is in order of admission: the oldest first."""

    def __init__(self, kv: KVManager, limits: Limits):
        self._kv = kv
        self._limits = limits
        self.preemption = Preemption(kv)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, wherever it stood: its blocks are free at once."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._kv.release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.become(State.ENDED)

    def schedule(self) -> StepPlan:
        """The plan of the next step; every chunk in it has its blocks. Empty only if there is nothing to do."""
        self._kv.start_step()
        num_preemptions = self.preemption.num_preemptions
        decodes = [sequence for sequence in self.running if sequence.num_uncomputed_tokens == 1]
        prefills = [sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1]
        chunks, budget = self._continue([], decodes, self._limits.max_num_batched_tokens)
        if chunks:
            num_prompts = max(1, len(prefills) + len(self.waiting))
            budget = min(budget, num_prompts * self._limits.max_prefill_chunk)
        chunks, budget = self._continue(chunks, prefills, budget)
        for chunk in chunks:
            if chunk.length > 1:
                self._kv.remember(chunk.sequence, chunk.end)
        if self.waiting and budget > 0 and self.preemption.num_preemptions == num_preemptions:
            chunks += self._admit_waiting(budget)
        chunks.sort(key=lambda chunk: chunk.length != 1)
        return StepPlan(tuple(chunks), self._kv.take_copies())

    def _continue(self, chunks: list[Chunk], sequences: list[Sequence], budget: int) -> tuple[list[Chunk], int]:
        """`chunks` and those of these running sequences, oldest first, and what is left of the budget."""
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.state is not State.RUNNING or sequence.is_full:
                continue
            chunk = self._chunk(sequence, budget)
            missing = self._kv.num_missing_blocks(sequence, chunk.end)
            if missing:
                if missing > self._kv.pool.num_available:
                    self.waiting.extendleft(self.preemption.make_room(missing, sequence, self.running))
                    budget += sum(chunk.length for chunk in chunks if chunk.sequence.state is not State.RUNNING)
                    chunks = [chunk for chunk in chunks if chunk.sequence.state is State.RUNNING]
                    if sequence.state is not State.RUNNING:
                        continue
                self._kv.extend(sequence, chunk.end)
            chunks.append(chunk)
            budget -= chunk.length
        return chunks, budget

    def _admit_waiting(self, budget: int) -> list[Chunk]:
        """Start waiting sequences, first come first served, while the pool can hold all they have so far.

        Each begins with what the cache has of it, written by this very step perhaps: this is planned behind all
        preemptions, so that nothing which others count on is taken back. A newcomer also leaves room for what running
        sequences still lack of their prompts, and a small reserve, so that it does not become the next victim.
        """
        chunks = []
        spare = self._kv.pool.num_available - sum(
            self._kv.num_missing_blocks(sequence, sequence.num_tokens) for sequence in self.running
        )
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.num_pending_tokens > 0:
                break
            match = self._kv.match(sequence)
            wanted = self._kv.num_wanted_blocks(sequence, match)
            reserve = self._kv.pool.num_blocks // 100 if self.running else 0
            if wanted + reserve > spare:
                break
            self.waiting.popleft()
            sequence.become(State.RUNNING)
            self.running.append(sequence)
            self._kv.begin(sequence, match)
            chunk = self._chunk(sequence, budget)
            self._kv.extend(sequence, chunk.end)
            self._kv.remember(sequence, chunk.end)
            chunks.append(chunk)
            budget -= chunk.length
            spare -= wanted
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        lacking = sequence.num_uncomputed_tokens
        length = lacking if lacking < budget else budget
        return Chunk(sequence, sequence.num_computed_tokens, length, length == lacking)

    def check_invariants(self) -> None:
        """Nobody stands in both queues, waiting sequences hold nothing, and the pool's books are right."""
        for sequence in self.waiting:
            if sequence.state is not State.WAITING or sequence.block_table:
                raise AssertionError(f"{sequence.request_id} waits and is not free of blocks")
        for sequence in self.running:
            if sequence.state is not State.RUNNING:
                raise AssertionError(f"{sequence.request_id} stands among the running and does not run")
        self._kv.check_invariants(self.running)
