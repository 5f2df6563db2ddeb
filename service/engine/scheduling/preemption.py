"""Who gives up its blocks when they run out, and what becomes of it.

A victim is a whole group: its branches leave together and wait in their place in the queue. What was computed for them
is either copied to the host and back or, unless the cache still has it when they return, computed again: whichever is
the cheaper for that group as things stand. Where a second tier is, copies are made ahead of need, so that a victim's
blocks can be had at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.fair_share import Tenants
from service.engine.scheduling.swap_cost import CostModel, Crowd
from service.engine.sequence import Sequence, SequenceGroup, State
from service.engine.step import FinishedTransfer, StepPlan

AUTO, SWAP, RECOMPUTE = MODES = ("auto", "swap", "recompute")

PROTECTED_STEPS = 64
"""For so many steps a group that was brought back leaves only if no other can."""


class Preemption:
    """The youngest leaves first, one that was just brought back last, and the oldest never: it comes to its end. Where
    there are several tenants, those that hold more than their shares of the blocks come before all others."""

    def __init__(self, kv: KVManager, costs: CostModel | None = None, mode: str = AUTO):
        """Without `costs` every group counts as cheaper to copy."""
        self._kv = kv
        self.costs = costs
        self._mode = mode
        self.num_swapped = self.num_recomputed = self.num_called_back = 0
        self.num_tokens_again = 0
        self.again_s = self.out_s = self.in_s = 0.0
        self.tenants: Tenants | None = None
        self._step = 0
        self._back_at: WeakKeyDictionary[SequenceGroup, int] = WeakKeyDictionary()
        self._num_promised = 0
        self._num_running = 1
        num_blocks = kv.pool.num_blocks
        self._low = max(num_blocks // 32, min(64, num_blocks // 4))
        self._num_saved_wanted = max(self._low, num_blocks // 8)
        if costs is not None and mode != SWAP:
            kv.may_bring = self._may_bring

    @property
    def num_preemptions(self) -> int:
        return self.num_swapped + self.num_recomputed

    def start_step(self, num_running: int) -> None:
        """A new plan is being made, for so many sequences that hold blocks."""
        self._step += 1
        self._num_promised = 0
        self._num_running = max(1, num_running)

    def came_back(self, group: SequenceGroup) -> None:
        """The group runs again, or for the first time."""
        if group in self._back_at:
            self._back_at[group] = self._step

    def make_room(self, num_blocks: int, claimant: Sequence, running: list[Sequence]) -> list[SequenceGroup]:
        """Preempt until `num_blocks` are available, or will be once copies under way are done, or the claimant itself
        had to go.

        Returns the victims; their sequences are WAITING and no longer in `running`.
        """
        victims: list[SequenceGroup] = []
        while claimant.group not in victims and self.num_in_sight() < num_blocks:
            group = self._next_victim(running)
            self._evict(group, running)
            victims.append(group)
        if claimant.group not in victims and self._kv.pool.num_available < num_blocks:
            self._num_promised += num_blocks
        return victims

    def call_back(self, groups: Iterable[SequenceGroup], running: list[Sequence]) -> None:
        """These leave, for others whose tenants have less than their shares."""
        for group in groups:
            self._evict(group, running)
            self.num_called_back += 1

    def is_settled(self, group: SequenceGroup) -> bool:
        """Whether the group was not brought back just now."""
        return self._step - self._back_at.get(group, -math.inf) > PROTECTED_STEPS

    def prepare(self, running: list[Sequence]) -> None:
        """Copy ahead of need what will have to leave soon, if the host has nothing to do for it anyway."""
        kv = self._kv
        if kv.host is None or kv.host.num_leaving or not running:
            return
        wanted = min(self._num_saved_wanted, kv.host.pool.num_blocks // 2) - kv.pool.num_free - kv.pool.num_saved
        if wanted > 0 and (kv.shares or self._mode != RECOMPUTE):
            kv.save_cached(min(wanted, kv.host.pool.num_available))
        if kv.pool.num_available < self._low:
            group = self._next_victim(running)
            if self._prefers_swap(group):
                for sequence in group.live:
                    kv.save(sequence)

    def saw_transfer(self, done: FinishedTransfer) -> None:
        """A transfer is done."""
        if done.is_out:
            self.out_s += done.seconds
        else:
            self.in_s += done.seconds
        if self.costs is not None:
            self.costs.saw_transfer(done.num_blocks, done.seconds, out=done.is_out)

    def saw_step(self, plan: StepPlan, seconds: float, num_tokens_again: int = 0) -> None:
        """The device was busy with this plan for so long; so many of its tokens had been computed before."""
        if num_tokens_again:
            self.num_tokens_again += num_tokens_again
            self.again_s += seconds * num_tokens_again / plan.num_tokens
        if self.costs is None:
            return
        if plan.chunks[-1].length == 1:  # the longest ones come last
            self.costs.saw_decode(seconds)
        else:
            spans = [(chunk.start, chunk.end) for chunk in plan.chunks if chunk.length > 1]
            self.costs.saw_prompts(spans, seconds, with_decodes=len(spans) < len(plan.chunks))

    def num_in_sight(self) -> int:
        """Blocks that are available or about to be, less those that others wait for already."""
        return self._kv.pool.num_available + self._kv.num_returning_blocks() - self._num_promised

    def _next_victim(self, running: list[Sequence]) -> SequenceGroup:
        groups = list(dict.fromkeys(sequence.group for sequence in reversed(running)))
        others = groups[:-1] or groups  # the oldest only if it is alone
        if self.tenants is not None:
            others = self.tenants.lenders_of_blocks(others, running) or others
        return next(filter(self.is_settled, others), others[0])

    def _evict(self, group: SequenceGroup, running: list[Sequence]) -> None:
        swaps = self._prefers_swap(group)
        if self.tenants is not None:
            self.tenants.gives_up(group)
        for sequence in group.live:
            running.remove(sequence)
            sequence.num_once_computed_tokens = max(sequence.num_once_computed_tokens, sequence.num_computed_tokens)
            if swaps:
                self._kv.swap_out(sequence)
            else:
                self._kv.release(sequence)
            sequence.become(State.WAITING)
        group.disband()
        self._back_at[group] = self._step
        self.num_swapped += swaps
        self.num_recomputed += not swaps

    def _prefers_swap(self, group: SequenceGroup) -> bool:
        """Whether to copy the group out and in rather than to compute it again; all of it or nothing."""
        host = self._kv.host
        if host is None or self._mode == RECOMPUTE:
            return False
        lost = self._kv.what_leaves(group.live)
        if not lost.num_remembered or lost.num_unsaved > host.pool.num_available:
            return False
        if self.costs is None or self._mode == SWAP:
            return True
        size = self._kv.block_size
        first, end = (count * size for count in (lost.num_remembered - lost.num_alone, lost.num_remembered))
        return self.costs.swap_s(lost.num_unsaved, lost.num_alone, self._crowd) < self.costs.recompute_s(first, end)

    def _may_bring(self, num_tokens: int, num_blocks: int) -> bool:
        end = num_tokens + num_blocks * self._kv.block_size
        return self.costs.swap_s(0, num_blocks, self._crowd) < self.costs.recompute_s(num_tokens, end)

    @property
    def _crowd(self) -> Crowd:
        host = self._kv.host
        return Crowd(num_running=self._num_running, num_leaving=host.num_leaving, num_arriving=host.num_arriving)
