"""Speculation: decodes with draft tokens, verified by the step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile

from service.engine.drafting.drafter import GRAMMAR, MAX_DRAFTS, Drafter, LateDrafts
from service.engine.drafting.lengths import Acceptance, Drafting, DraftLengths
from service.engine.drafting.shadow import ShadowDrafts
from service.engine.drafting.stats import DraftStats
from service.engine.kv.kv_manager import KVManager
from service.engine.sequence import Sequence
from service.engine.step import Chunk, StepPlan, StepResult

MAX_SILENT, SILENT_STEPS = 3, (4, 100)
"""A draft head that drafts nothing 3 times in a row (batch too large, or after prompts) is skipped for 4 steps; the
wait doubles each time, up to 100."""
HOPE = 0.9
"""Acceptance that a trial of a draft head or model assumes: past acceptance says nothing about the next text."""
IDLE_STEPS = 8
"""Steps until drafts of a draft head or model are considered again."""
SEQUENCES_PER_WAIT, LOOKS_PER_WAIT, MAX_WAIT = 8, 16, 3
"""After a step without drafts, guesses are not compared for one step per 8 sequences or per 16 fruitless comparisons in
a row, at most 3. The next comparison covers all tokens since."""


class Speculation:
    """Draft selection. Drafts follow known tokens, so a step with drafts is collected before the next is planned; other
    steps overlap. Tokens forced by a grammar are drafts too.

    Guesses of a drafter without a device are compared for every sequence, drafted or not (ShadowDrafts). Drafts that
    cost device time are retried now and then (DraftLengths).
    """

    def __init__(
        self,
        kv: KVManager,
        vocab_size: int,
        drafter: Drafter | None = None,
        max_drafts: int = MAX_DRAFTS,
        lengths: DraftLengths | None = None,
        num_ahead: int = 0,
    ):
        """Without a drafter, only grammars draft. `num_ahead`: tokens after a step's that the drafter writes."""
        self._num_ahead = num_ahead
        self._kv = kv
        self._vocab_size = vocab_size
        self._max_drafts = max_drafts
        self._drafter = drafter
        is_free = drafter is not None and not drafter.writes_cache
        self._shadows = ShadowDrafts(drafter, max_drafts) if drafter is not None and is_free else None
        self._acceptance = Acceptance()
        self._drafting_s = 0.0
        self._max_added: int | None = None  # limit of the last planned step
        self._unlearned: list[tuple[Chunk, int]] = []  # (chunk, accepted drafts)
        self._unlearned_steps: list[tuple[int, int, float]] = []  # rows, drafts, seconds
        self._asked: tuple[list[Sequence], int] = [], 0  # sequences asked for drafts, and rows
        self._chosen: list[int] | None = None  # lengths chosen ahead for `_asked`
        self._steps_to_wait = 0
        self._num_silent = 0  # times in a row without drafts
        self._silent_steps = SILENT_STEPS[0]
        self._num_looks = 0  # fruitless comparisons in a row
        self.lengths = lengths or DraftLengths()
        self.stats = DraftStats()
        self.last_drafts: dict[Sequence, tuple[int, int]] = {}  # (drafted, accepted) in the last step with decodes

    def needs_known_tokens(self, running: Iterable[Sequence]) -> bool:
        """Return True if the step in flight must be collected before the next is planned: it has drafts, or drafts are
        likely to outweigh the lost overlap."""
        if self.stats.last_mean_length:
            return True
        running = list(running)
        if self._is_skipped(running):
            self._steps_to_wait -= 1
            return False
        rooms = {one: room for one in running if one.num_uncomputed_tokens == 1 and (room := self._room(one))}
        for sequence in rooms:
            matcher = sequence.matcher
            if matcher is not None and len(matcher.forced_tokens()) > sequence.num_pending_tokens:
                return True
        if self._drafter is None or self._max_added == 0:
            return False
        if self._shadows is not None:
            return bool(self._choose_shadows(self._shadows, rooms, len(rooms)))
        if self._is_waiting():
            return False
        most = [min(room, self._max_drafts) for room in rooms.values()]
        return any(self._choose_drafted([*rooms], most, len(rooms)))

    def add_drafts(self, chunks: list[Chunk], max_tokens: int, extended: set[Sequence]) -> list[Chunk]:
        """Add at most `max_tokens` drafts to one-token chunks, as blocks allow. Sequences that get blocks are added to
        `extended`."""
        self.stats.last_mean_length, self._max_added = 0.0, max_tokens
        self.last_drafts.clear()
        if self._is_skipped([one.sequence for one in chunks]):
            if not chunks[0].sequence.num_pending_tokens:  # else `needs_known_tokens` has counted this step
                self._steps_to_wait -= 1
            return chunks
        rooms = {one.sequence: self._room(one.sequence) for one in chunks if not one.sequence.num_pending_tokens}
        if not any(rooms.values()):
            return chunks
        drafts: dict[Sequence, Seq[int]] = {}
        self._add_forced(drafts, rooms)
        reserved: set[Sequence] = set()
        if self._shadows is not None:
            self._add_shadows(drafts, self._shadows, rooms, len(chunks))
        elif self._drafter is not None:
            reserved = self._add_drafted(drafts, self._drafter, rooms, len(chunks), extended)
        if not drafts:
            return chunks
        drafted, num_left = [], max_tokens
        for chunk in chunks:
            sequence = chunk.sequence
            own = drafts.get(sequence, ())[:num_left]
            if own and (sequence in reserved or self._reserve(sequence, len(own), extended)):
                num_left -= len(own)
                chunk = Chunk(sequence, chunk.start, 1 + len(own), chunk.sampled_sequences, own)
            drafted.append(chunk)
        self.stats.last_mean_length = (max_tokens - num_left) / len(drafted)
        return drafted

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count the accepted drafts of requests; `learn` does the rest."""
        if result.indptr is None:
            return
        spans = iter(zip(result.indptr, result.indptr[1:], strict=False))
        for chunk in plan.chunks:
            for _, (start, stop) in zip(chunk.sampled_sequences, spans, strict=False):
                if chunk.drafts:
                    num_accepted, group = max(0, stop - start - 1), chunk.sequence.group
                    group.num_draft_tokens += len(chunk.drafts)
                    group.num_accepted_tokens += num_accepted
                    self._unlearned.append((chunk, num_accepted))
                    self.last_drafts[chunk.sequence] = len(chunk.drafts), num_accepted

    def learn(self) -> None:
        """Learn from collected steps and choose draft lengths for the next, while a step runs."""
        for num_rows, num_drafts, seconds in self._unlearned_steps:
            self.lengths.on_step(num_rows, num_drafts, seconds)
            if self._drafter is not None:
                self._acceptance.on_step(self._drafter.source, num_drafts)
        for chunk, num_accepted in self._unlearned:
            self._count(chunk, num_accepted)
        self.lengths.on_accepted(
            sum(count for chunk, count in self._unlearned if chunk.sequence.draft_source != GRAMMAR)
        )
        self._unlearned.clear()
        self._unlearned_steps.clear()
        self._chosen = None
        if self.stats.last_mean_length and self._asked[0]:
            sequences, num_rows = self._asked
            self._chosen = self._choose_drafted(sequences, [self._max_drafts] * len(sequences), num_rows)

    def on_step(self, plan: StepPlan, seconds: float, has_overlapped: bool) -> None:
        """Learn from the seconds since the previous step's tokens, minus drafting. Plain steps that did not overlap are
        ignored."""
        num_rows, num_drafts = len(plan.chunks), sum(len(chunk.drafts) for chunk in plan.chunks)
        if num_drafts:
            seconds, self._drafting_s = seconds - self._drafting_s, 0.0
        if plan.num_tokens == num_rows + num_drafts and (num_drafts or has_overlapped):
            self._unlearned_steps.append((num_rows, num_drafts, seconds))

    def on_end(self, sequence: Sequence) -> None:
        self.last_drafts.pop(sequence, None)
        self._asked = [], 0
        if self._drafter is not None:
            self._drafter.on_end(sequence)
        if self._shadows is not None:
            self._shadows.on_end(sequence)

    def _count(self, chunk: Chunk, num_accepted: int) -> None:
        source = chunk.sequence.draft_source
        self.stats.add(source, num_accepted, len(chunk.drafts))
        if self._shadows is None:
            self._acceptance.on_result(source, chunk.sequence, num_accepted, len(chunk.drafts))

    def _choose_drafted(self, sequences: list[Sequence], most: list[int], num_rows: int) -> list[int]:
        """Choose how many tokens, at most `most`, the device drafts for each sequence."""
        if self._drafter is None:
            return [0] * len(sequences)
        gains = self._acceptance.gains(self._drafter.source, sequences, most)
        return self.lengths.choose(gains, num_rows, Drafting(self._drafter.token_s, self._max_added, HOPE))

    def _room(self, sequence: Sequence) -> int:
        """Return the most drafts that can be accepted once the sequence's tokens are known."""
        # Beams and forks sample several sequences, or need more than the next token.
        is_alone = sequence.sampled_sequences == (sequence,) and not sequence.prefix_followers
        if sequence.cannot_run_ahead or not is_alone:
            return 0
        if self._drafter is None and sequence.matcher is None:
            return 0
        return max(0, min(MAX_DRAFTS, sequence.max_num_tokens - sequence.num_tokens - 1))

    def _add_forced(self, drafts: dict[Sequence, Seq[int]], rooms: dict[Sequence, int]) -> None:
        for sequence, room in rooms.items():
            matcher = sequence.matcher
            if matcher is not None and room:
                forced = self._usable(sequence, matcher.forced_tokens())[:room]
                if forced:
                    drafts[sequence], rooms[sequence] = forced, 0
                    sequence.draft_source = GRAMMAR

    def _add_shadows(
        self, drafts: dict[Sequence, Seq[int]], shadows: ShadowDrafts, rooms: dict[Sequence, int], num_rows: int
    ) -> None:
        chosen = self._choose_shadows(shadows, rooms, num_rows + sum(map(len, drafts.values())))
        self.lengths.on_planned(len(chosen))
        for sequence, own in chosen:
            own = self._usable(sequence, own)
            if own:
                drafts[sequence] = own
                sequence.draft_source = shadows.source

    def _choose_shadows(
        self, shadows: ShadowDrafts, rooms: dict[Sequence, int], num_rows: int
    ) -> list[tuple[Sequence, Seq[int]]]:
        """Return the guesses worth their rows, unless this step skips the comparison."""
        if self._is_waiting():
            return []
        chosen = self._worthwhile(shadows, rooms, num_rows)
        if chosen:
            self._num_looks = 0
        else:
            self._num_looks += 1
            self._steps_to_wait = min(
                MAX_WAIT, max(len(rooms) // SEQUENCES_PER_WAIT, self._num_looks // LOOKS_PER_WAIT)
            )
        return chosen

    def _worthwhile(
        self, shadows: ShadowDrafts, rooms: dict[Sequence, int], num_rows: int
    ) -> list[tuple[Sequence, Seq[int]]]:
        """Return the guesses worth their rows. A sequence's first guesses stand for its pending tokens."""
        found, gains = [], []
        for sequence, shadow in shadows.look(one for one, room in rooms.items() if room):
            first, room = shadow.num_right + sequence.num_pending_tokens, rooms[sequence]
            own = shadow.drafts[first : first + room]
            if own:
                found.append((sequence, own))
                gains.append(shadows.gains(shadow.streak)[first - shadow.num_right :][: len(own)])
        if not found or not self.lengths.may_pay(sum(map(sum, gains)), num_rows):
            return []
        chosen = self.lengths.choose(gains, num_rows, Drafting(max_drafts=self._max_added))
        return [(sequence, own[:count]) for (sequence, own), count in zip(found, chosen, strict=True) if count]

    def _is_skipped(self, sequences: Seq[Sequence]) -> bool:
        """Return True if the step waits and no grammar may draft in it."""
        return bool(self._steps_to_wait and sequences) and all(one.matcher is None for one in sequences)

    def _is_waiting(self) -> bool:
        if not self._steps_to_wait:
            return False
        self._steps_to_wait -= 1
        return True

    def _add_drafted(
        self,
        drafts: dict[Sequence, Seq[int]],
        drafter: Drafter,
        rooms: dict[Sequence, int],
        num_rows: int,
        extended: set[Sequence],
    ) -> set[Sequence]:
        """Draft on the device, counting its time in the choice; return the sequences with blocks for drafts."""
        if self._is_waiting():
            return set()
        asked = {one: min(room, self._max_drafts) for one, room in rooms.items() if room}
        asked = {one: count for one, count in asked.items() if not self._kv.awaits_copy(one)}
        sequences, num_rows = [*asked], num_rows + sum(map(len, drafts.values()))
        chosen = self._chosen if self._asked == (sequences, num_rows) else None
        if chosen is None:
            chosen = self._choose_drafted(sequences, [*asked.values()], num_rows)
        self._asked, self._chosen = (sequences, num_rows), None
        if not any(chosen):
            self.lengths.on_planned(0)
            self._steps_to_wait = IDLE_STEPS if self.lengths.is_idle else 0
        kept = {
            one: count
            for (one, most), wanted in zip(asked.items(), chosen, strict=True)
            if (count := min(most, wanted)) and self._reserve(one, count, extended)
        }
        if not kept:
            return set()
        start_s = time.perf_counter()
        found = drafter.draft([*kept], [*kept.values()])
        self._drafting_s = time.perf_counter() - start_s
        num_late = max((len(own) for own in found if isinstance(own, LateDrafts)), default=0)
        if num_late:
            self._drafting_s = num_late * drafter.token_s
        for sequence, own in zip(kept, found, strict=True):
            own = self._usable(sequence, own[: kept[sequence]])
            if own:
                drafts[sequence] = own
                sequence.draft_source = drafter.source
        self._num_silent += 1
        if any(found):  # else the drafter starts with this step
            self._num_silent, self._silent_steps = 0, SILENT_STEPS[0]
            self.lengths.on_planned(sum(map(len, found)), self._drafting_s)
        elif self._num_silent >= MAX_SILENT:
            self._num_silent, self._steps_to_wait = 0, self._silent_steps
            self._silent_steps = min(2 * self._silent_steps, SILENT_STEPS[1])
        return set(kept)

    def _usable(self, sequence: Sequence, drafts: Seq[int]) -> Seq[int]:
        """Cut drafts before an id that is unknown, is a stop id or breaks the grammar. Without a grammar, late drafts
        stay whole: nothing waits for their ids."""
        if isinstance(drafts, LateDrafts) and sequence.matcher is None:
            return drafts
        stop_ids = sequence.group.stop_ids
        is_free = sequence.matcher is None and stop_ids.isdisjoint(drafts)
        if is_free and drafts and min(drafts) >= 0 and max(drafts) < self._vocab_size:
            return drafts
        usable = tuple(takewhile(lambda token: 0 <= token < self._vocab_size and token not in stop_ids, drafts))
        if sequence.matcher is None or not usable:
            return usable
        return usable[: sequence.matcher.num_valid(usable)]

    def _reserve(self, sequence: Sequence, num_drafts: int, extended: set[Sequence]) -> bool:
        """Allocate blocks for the next token and drafts, plus `num_ahead` tokens if available, without preempting."""
        end = sequence.num_computed_tokens + 1 + num_drafts
        ahead = min(end + self._num_ahead, sequence.max_num_tokens)
        num_available = self._kv.pool.num_available
        for wanted in (ahead, end) if ahead > end else (end,):
            num_missing = self._kv.num_missing_blocks(sequence, wanted)
            if num_missing > num_available:
                continue
            if num_missing:
                self._kv.extend(sequence, wanted)
                extended.add(sequence)
            sequence.num_exclusive_tokens = 0  # check every later block again: its slots are not contiguous
            return True
        return False
