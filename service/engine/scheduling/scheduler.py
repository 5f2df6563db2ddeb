"""Scheduler. A step of at most `max_num_batched_tokens` is planned in this order:

1. Groups over their tenant's share are preempted for tenants below theirs.
2. Running sequences that lack one token (decodes) get it, oldest first, with drafts under speculation. If blocks run
   out, the youngest groups are preempted.
3. With decodes, the budget shrinks to `Limits.prompt_budget`, as every decode waits for the step.
4. Running sequences that lack more (prefills) get chunks, oldest first.
5. If nothing was preempted, waiting groups are admitted while blocks last: in order, or from the tenant that runs the
   fewest. A group whose adapter finds no slot is skipped (`adapter_slots`).
6. Blocks likely to be preempted are copied to the host.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Set
from itertools import chain, islice
from operator import attrgetter

from service.engine.kv.kv_manager import KVManager
from service.engine.kv.prefix_cache import NO_MATCH, Match
from service.engine.scheduling.adapter_slots import AdapterSlotPool
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import Preemption
from service.engine.scheduling.prompt_outputs import PromptOutputs
from service.engine.scheduling.speculation import Speculation
from service.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from service.engine.step import Chunk, StepPlan


class Scheduler:
    """Queues `waiting` and `running`, oldest first; branches of a group are adjacent."""

    def __init__(
        self,
        kv: KVManager,
        limits: Limits,
        preemption: Preemption | None = None,
        speculation: Speculation | None = None,
        adapter_slots: AdapterSlotPool | None = None,
    ):
        self.kv = kv
        self.adapter_slots = adapter_slots
        self.limits = limits
        self.speculation = speculation
        self.preemption = preemption or Preemption(kv, FairShare(kv, limits.max_num_seqs))
        self._fair_share = self.preemption.fair_share
        self._num_arrivals = 0
        self.waiting: deque[SequenceGroup] = deque()
        self._prompt_outputs = PromptOutputs()
        self.running: list[Sequence] = []
        self._extended: set[Sequence] = set()  # by the current plan

    def add_group(self, group: SequenceGroup) -> None:
        self._num_arrivals += 1
        group.arrival = self._num_arrivals
        self._fair_share.add_group(group)
        self.waiting.append(group)
        if self.adapter_slots is not None:
            self.adapter_slots.add_group(group)
        self._prompt_outputs.add_group(group)

    def remove_sequence(self, sequence: Sequence) -> None:
        group, status = sequence.group, sequence.status
        sequence.set_status(SequenceStatus.ENDED)
        if self.speculation is not None:
            self.speculation.on_end(sequence)
        if status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            if sequence.prefix_followers:
                self._promote_follower(sequence)
            elif sequence.is_waiting_for_leader:
                self._remove_follower(sequence)
            self.kv.release(sequence)
        else:
            self.kv.unpin_host(sequence)
            if not group.live:
                self.waiting.remove(group)
        if not group.live:
            self._fair_share.remove_group(group)
            self.kv.drop_request(sequence)
            if self.adapter_slots is not None:
                self.adapter_slots.remove_group(group)

    def fork_followers(self, leader: Sequence) -> None:
        """Fork followers that diverge within the leader's computed tokens."""
        forking = [one for one in leader.prefix_followers if one.num_inherited_tokens <= leader.num_computed_tokens]
        for follower in forking:
            match = self._match_follower(follower) if follower.num_output_tokens else NO_MATCH
            follower.is_waiting_for_leader = False
            if match.num_tokens > follower.num_inherited_tokens and self.kv.can_attach(match):
                self.kv.attach(follower, match)
            else:
                self.kv.fork(leader, follower, follower.num_inherited_tokens)
        leader.share_prefix_with([one for one in leader.prefix_followers if one.is_waiting_for_leader])

    def schedule(self) -> StepPlan:
        """Return the next step, with blocks allocated for its chunks; empty while every sequence waits for tokens."""
        self.kv.start_step()
        self.preemption.start_step(len(self.running))
        self._fair_share.start_step()
        self._extended.clear()
        if self.adapter_slots is not None and self.adapter_slots.num_open:
            self.adapter_slots.start_step(self.running)
        if self.waiting and self._fair_share.has_several_tenants:
            self._reclaim_over_share()
        num_preemptions, arriving = self.preemption.num_preemptions, self.kv.swapping_in()
        decodes, prefills = self._runnable(arriving)
        chunks = self._plan_decodes(decodes[: self.limits.max_num_batched_tokens], bool(prefills or self.waiting))
        budget = self.limits.max_num_batched_tokens - len(chunks)
        if self.speculation is not None:
            budget -= sum(len(chunk.drafts) for chunk in chunks)
        if chunks:
            num_prompts = len(prefills) + len(self.waiting)
            budget = min(budget, self.limits.prompt_budget(len(chunks), num_prompts, self._prompt_lengths(prefills)))
        if prefills:
            chunks, budget = self._plan_prefills(chunks, prefills, budget)
            for chunk in chunks:
                if chunk.length > 1:
                    self.kv.cache_blocks(chunk.sequence, chunk.end)
        num_running = len(self.running)
        if self.waiting and budget > 0 and self.preemption.num_preemptions == num_preemptions:
            chunks += self._plan_admissions(budget)
        if prefills or self.speculation is not None or len(self.running) > num_running:
            chunks.sort(key=lambda chunk: chunk.length != 1)
        self.preemption.save_ahead(self.running)
        scores, pools = self._prompt_outputs.plan(chunks)
        changed = tuple(chunk for chunk in chunks if chunk.sequence in self._extended and chunk.length == 1)
        return StepPlan(tuple(chunks), self.kv.drain_copies(), *self.kv.drain_swaps(), scores, pools, changed)

    def _admissible(self) -> Iterable[SequenceGroup]:
        if self.adapter_slots is None or not self.adapter_slots.num_open:
            return self.waiting
        return self.adapter_slots.admissible(self.waiting)

    def _runnable(self, arriving: Set[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        decodes, prefills = [], []
        for sequence in self.running:
            num_pending = sequence.num_pending_tokens
            num_tokens = len(sequence.token_ids) + num_pending
            # A pending token may be the last, or the next step may need its id.
            if num_pending and (sequence.cannot_run_ahead or num_tokens >= sequence.max_num_tokens):
                continue
            if sequence.is_waiting_for_leader or (arriving and sequence in arriving):
                continue
            lacking = num_tokens - sequence.num_computed_tokens
            if lacking == 1:
                decodes.append(sequence)
            elif lacking:
                prefills.append(sequence)
        return decodes, prefills

    def _prompt_lengths(self, prefills: list[Sequence]) -> Iterator[int]:
        num_slots = max(0, self.limits.max_num_seqs - len(self.running))
        waiting = (group.live[0] for group in islice(self.waiting, num_slots))
        return (sequence.num_uncomputed_tokens for sequence in chain(prefills, waiting))

    def _plan_decodes(self, sequences: list[Sequence], has_prompts: bool) -> list[Chunk]:
        """Return a chunk per decode. With prompts waiting, drafts get half of the remaining budget, or prompts would
        starve."""
        for sequence in [one for one in sequences if one.num_computed_tokens >= one.num_exclusive_tokens]:
            if sequence.status is SequenceStatus.RUNNING:
                self._allocate(sequence, sequence.num_computed_tokens + 1)
        chunks = [
            Chunk(sequence, sequence.num_computed_tokens, 1, sequence.sampled_sequences)
            for sequence in sequences
            if sequence.num_computed_tokens < sequence.num_exclusive_tokens
            and sequence.status is SequenceStatus.RUNNING
        ]
        if self.speculation is None:
            return chunks
        max_drafts = self.limits.max_num_batched_tokens - len(chunks)
        if has_prompts:
            max_drafts //= 2
        if self.limits.max_decode_rows is not None:
            max_drafts = min(max_drafts, self.limits.max_decode_rows - len(chunks))
        return self.speculation.add_drafts(chunks, max(0, max_drafts), self._extended)

    def _allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the sequence, preempting others; return True if it got the blocks."""
        missing = self.kv.num_missing_blocks(sequence, num_tokens)
        if missing > self.kv.pool.num_available:
            self._requeue(self.preemption.make_room(missing, sequence, self.running))
            if sequence.status is not SequenceStatus.RUNNING or missing > self.kv.pool.num_available:
                return False
        self.kv.extend(sequence, num_tokens)
        self._extended.add(sequence)
        return True

    def _plan_prefills(self, chunks: list[Chunk], sequences: list[Sequence], budget: int) -> tuple[list[Chunk], int]:
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:  # preempted for an earlier sequence
                continue
            chunk = self._chunk(sequence, budget)
            num_preemptions = self.preemption.num_preemptions
            has_room = self._allocate(sequence, chunk.end)
            if self.preemption.num_preemptions > num_preemptions:
                budget += sum(chunk.length for chunk in chunks if chunk.sequence.status is not SequenceStatus.RUNNING)
                chunks = [chunk for chunk in chunks if chunk.sequence.status is SequenceStatus.RUNNING]
            if has_room:
                chunks.append(chunk)
                budget -= chunk.length
        return chunks, budget

    def _plan_admissions(self, budget: int) -> list[Chunk]:
        """Admit ready groups while the pool holds their tokens, the blocks running sequences lack, and a reserve.

        Admission follows preemption, so no prefix written by this step is evicted.
        """
        chunks = []
        spare = self.kv.pool.num_available - self._num_missing_blocks()
        num_running = self._fair_share.num_running(self.running) if self._fair_share.has_several_tenants else Counter()
        while self.waiting and budget > 0:
            group = self._fair_share.next_group(self._admissible(), num_running)
            if group is None or group.has_pending_tokens:
                break
            if len(self.running) + len(group.live) > self.limits.max_num_seqs:
                break
            group.wait_for_leader()
            leader, *others = group.live
            num_behind = sum(map(self.kv.num_missing_for_all, others))
            room = spare - self._num_reserve_blocks - num_behind
            needs_whole_prompt = group.wants_prompt_logprobs or group.wants_pooling
            match = NO_MATCH if needs_whole_prompt else self._match_within(leader, room)
            wanted = self.kv.num_blocks_for_match(leader, match)
            if wanted > room:
                group.stop_sharing()
                break
            self.waiting.remove(group)
            self._start_running(group)
            num_running[group.tenant] += len(group.live)
            self.kv.attach(leader, match)
            if self.adapter_slots is not None:
                self.adapter_slots.take(group)
            spare -= wanted + num_behind
            if leader not in self.kv.swapping_in():
                chunk = self._chunk(leader, budget)
                self.kv.extend(leader, chunk.end)
                self._extended.add(leader)
                self.kv.cache_blocks(leader, chunk.end)
                chunks.append(chunk)
                budget -= chunk.length
        return chunks

    def _reclaim_over_share(self) -> None:
        num_free_blocks = self.preemption.num_available_soon() - self._num_missing_blocks() - self._num_reserve_blocks
        over_share = self._fair_share.groups_over_share(
            list(self._admissible()), self.running, num_free_blocks, self.preemption.is_preemptible
        )
        self.preemption.reclaim(over_share, self.running)
        self._requeue(over_share)

    def _match_follower(self, follower: Sequence) -> Match:
        """Return the follower's prefix from before a preemption, if the others' blocks remain."""
        others = self._num_missing_blocks() - self.kv.num_missing_for_all(follower)
        return self._match_within(follower, self.kv.pool.num_available - others)

    def _match_within(self, sequence: Sequence, num_blocks: int) -> Match:
        return self.kv.match_within_blocks(sequence, num_blocks, self.preemption.should_swap_in)

    def _start_running(self, group: SequenceGroup) -> None:
        position = len(self.running)
        while position and self.running[position - 1].group.arrival > group.arrival:
            position -= 1
        self.running[position:position] = group.live
        for sequence in group.live:
            sequence.set_status(SequenceStatus.RUNNING)
        self.preemption.mark_resumed(group)
        times = group.request.times
        if times is not None and not times.started_s:
            times.started_s = time.time()

    def _requeue(self, victims: list[SequenceGroup]) -> None:
        for group in victims:
            self.waiting.insert(bisect(self.waiting, group.arrival, key=attrgetter("arrival")), group)

    @property
    def _num_reserve_blocks(self) -> int:
        """Reserve, without which an admitted group is the next victim."""
        return self.kv.pool.num_blocks // 100 if self.running else 0

    def _num_missing_blocks(self) -> int:
        growing = [one for one in self.running if one.num_tokens > one.num_exclusive_tokens]
        return sum(map(self.kv.num_missing_for_all, growing))

    def _promote_follower(self, leader: Sequence) -> None:
        successor, *others = leader.prefix_followers
        self.kv.fork(leader, successor, min(leader.num_computed_tokens, successor.num_inherited_tokens))
        successor.is_waiting_for_leader = False
        successor.share_prefix_with(others)

    def _remove_follower(self, follower: Sequence) -> None:
        for leader in follower.group.live:
            if follower in leader.prefix_followers:
                leader.share_prefix_with([one for one in leader.prefix_followers if one is not follower])

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start = sequence.num_computed_tokens
        lacking = len(sequence.token_ids) + sequence.num_pending_tokens - start
        if lacking > budget:
            return Chunk(sequence, start, budget, ())
        return Chunk(sequence, start, lacking, sequence.sampled_sequences)

    def check_invariants(self) -> None:
        for group in self.waiting:
            for sequence in group.live:
                if (
                    sequence.status is not SequenceStatus.WAITING
                    or sequence.block_table
                    or sequence.is_waiting_for_leader
                ):
                    raise AssertionError(f"{sequence.request_id} is waiting and holds blocks")
        positions: dict[SequenceGroup, list[int]] = {}
        for position, sequence in enumerate(self.running):
            positions.setdefault(sequence.group, []).append(position)
            if sequence.status is not SequenceStatus.RUNNING or (
                sequence.is_waiting_for_leader and sequence.block_table
            ):
                raise AssertionError(f"{sequence.request_id} is in the running queue, but not RUNNING")
        for group, held in positions.items():
            if len(held) != len(group.live) or held[-1] - held[0] != len(held) - 1:
                raise AssertionError(f"{group.request_id} is not contiguous in the running queue")
        self.kv.check_invariants(self.running)
        if self.adapter_slots is not None:
            self.adapter_slots.check_invariants(self.running)
