"""Decodes with draft tokens, which the step verifies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile

from service.engine.drafting.drafter import GRAMMAR, MAX_DRAFTS, Drafter
from service.engine.drafting.lengths import DraftLengths
from service.engine.drafting.stats import DraftStats
from service.engine.kv.kv_manager import KVManager
from service.engine.sequence import Sequence
from service.engine.step import Chunk, StepPlan, StepResult


class Speculation:
    """Drafts follow known tokens: no sequence runs ahead. Tokens that a grammar forces are drafts too."""

    def __init__(
        self,
        kv: KVManager,
        vocab_size: int,
        drafter: Drafter | None = None,
        max_drafts: int = MAX_DRAFTS,
        lengths: DraftLengths | None = None,
    ):
        """Without a drafter, only grammars draft."""
        self._kv = kv
        self._vocab_size = vocab_size
        self._drafter = drafter
        self._max_drafts = max_drafts
        self.lengths = lengths or DraftLengths()
        self.stats = DraftStats()
        self.last_drafts: dict[Sequence, tuple[int, int]] = {}  # (drafted, accepted) in the last step with decodes

    def add_drafts(self, chunks: list[Chunk], max_tokens: int, extended: set[Sequence]) -> list[Chunk]:
        """Add at most `max_tokens` drafts to one-token chunks, as blocks allow; to `extended`, sequences that got
        blocks."""
        self.stats.last_mean_length = 0.0
        self.last_drafts.clear()
        room = [self._room(chunk.sequence) for chunk in chunks]
        if not any(room):
            return chunks
        drafts: dict[Sequence, tuple[int, ...]] = {}
        self._add_forced(drafts, chunks, room)
        if self._drafter is not None:
            self._add_drafted(drafts, self._drafter, [*zip(chunks, room, strict=True)], extended)
        drafted = []
        for chunk in chunks:
            own = drafts.get(chunk.sequence, ())[:max_tokens]
            if own and self._reserve(chunk.sequence, len(own), extended):
                max_tokens -= len(own)
                chunk = chunk._replace(length=1 + len(own), drafts=own)
            drafted.append(chunk)
        self.stats.last_mean_length = sum(len(chunk.drafts) for chunk in drafted) / len(drafted)
        return drafted

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count the accepted drafts of a collected step."""
        if result.indptr is None:
            return
        samplers = iter(zip(result.indptr, result.indptr[1:], strict=False))
        for chunk in plan.chunks:
            for _, (start, stop) in zip(chunk.samplers, samplers, strict=False):
                if chunk.drafts:
                    self._count(chunk, max(0, stop - start - 1))

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        if self.lengths.cost is not None and all(chunk.length == 1 + len(chunk.drafts) for chunk in plan.chunks):
            self.lengths.cost.on_step(plan.num_tokens, seconds)

    def on_end(self, sequence: Sequence) -> None:
        self.last_drafts.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.on_end(sequence)

    def _count(self, chunk: Chunk, num_accepted: int) -> None:
        source = chunk.sequence.draft_source
        self.stats.add(source, num_accepted, len(chunk.drafts))
        self.last_drafts[chunk.sequence] = len(chunk.drafts), num_accepted
        self.lengths.on_result(source, chunk.sequence, num_accepted, len(chunk.drafts))
        chunk.sequence.group.num_draft_tokens += len(chunk.drafts)
        chunk.sequence.group.num_accepted_tokens += num_accepted

    def _room(self, sequence: Sequence) -> int:
        """Return the most drafts that can be accepted."""
        # Beams and forks have several samplers, or one that needs more than the next token.
        is_alone = sequence.samplers == (sequence,) and not sequence.prefix_followers
        if sequence.cannot_run_ahead or not is_alone or sequence.num_pending_tokens:
            return 0
        if self._drafter is None and sequence.matcher is None:
            return 0
        return max(0, min(MAX_DRAFTS, sequence.max_num_tokens - sequence.num_tokens - 1))

    def _add_forced(self, drafts: dict[Sequence, tuple[int, ...]], chunks: Seq[Chunk], room: list[int]) -> None:
        for index, chunk in enumerate(chunks):
            matcher = chunk.sequence.matcher
            if matcher is not None and room[index]:
                forced = self._usable(chunk.sequence, matcher.forced_tokens())[: room[index]]
                if forced:
                    drafts[chunk.sequence], room[index] = forced, 0
                    chunk.sequence.draft_source = GRAMMAR

    def _add_drafted(
        self,
        drafts: dict[Sequence, tuple[int, ...]],
        drafter: Drafter,
        chunks: Seq[tuple[Chunk, int]],
        extended: set[Sequence],
    ) -> None:
        """Draft for chunks with room. The number is chosen before drafting if that takes a device's time, else of
        the drafts found."""
        asked = {chunk.sequence: min(room, self._max_drafts) for chunk, room in chunks if room}
        num_rows = len(chunks) + sum(map(len, drafts.values()))
        if drafter.writes_cache:
            asked = {one: count for one, count in asked.items() if not self._kv.awaits_copy(one)}
            asked = self._choose(drafter, asked, num_rows, drafter.token_s)
            asked = {one: count for one, count in asked.items() if count and self._reserve(one, count, extended)}
        if not asked:
            return
        found = drafter.draft([*asked], [*asked.values()])
        found = [self._usable(one, own[: asked[one]]) for one, own in zip(asked, found, strict=True)]
        kept = dict(zip(asked, map(len, found), strict=True))
        if not drafter.writes_cache:
            kept = self._choose(drafter, kept, num_rows, 0.0)
        for (sequence, count), own in zip(kept.items(), found, strict=True):
            if count:
                drafts[sequence] = own[:count]
                sequence.draft_source = drafter.source

    def _choose(
        self, drafter: Drafter, most: dict[Sequence, int], num_rows: int, token_s: float
    ) -> dict[Sequence, int]:
        chosen = self.lengths.choose(drafter.source, [*most], [*most.values()], num_rows, token_s)
        return dict(zip(most, chosen, strict=True))

    def _usable(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Cut drafts before an unknown id, a stop id, or one that the grammar forbids."""
        stop_ids = sequence.group.stop_ids
        usable = tuple(takewhile(lambda token: 0 <= token < self._vocab_size and token not in stop_ids, drafts))
        if sequence.matcher is None or not usable:
            return usable
        return usable[: sequence.matcher.num_valid(usable)]

    def _reserve(self, sequence: Sequence, num_drafts: int, extended: set[Sequence]) -> bool:
        """Allocate blocks for the next token and drafts; preempt nothing."""
        end = sequence.num_computed_tokens + 1 + num_drafts
        if self._kv.num_missing_blocks(sequence, end) > self._kv.pool.num_available:
            return False
        self._kv.extend(sequence, end)
        sequence.num_exclusive_tokens = 0  # each later block is looked at again: its slots follow no other's
        extended.add(sequence)
        return True
