"""Preemption and restoration of groups.

A victim is a whole group and keeps its queue position. It is restored by swapping in or recomputing, whichever is
cheaper then. Blocks are copied to the host ahead of need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.swap_cost import EngineLoad, SwapCostModel
from service.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from service.engine.step import FinishedTransfer, StepPlan

AUTO, SWAP, RECOMPUTE = MODES = ("auto", "swap", "recompute")

PROTECTED_STEPS = 64
"""Steps during which a resumed group is preempted last."""


class Preemption:
    """Victim selection: tenants over their share of blocks, then the youngest group; recently resumed groups last, the
    oldest never."""

    def __init__(
        self, kv: KVManager, fair_share: FairShare, costs: SwapCostModel | None = None, mode: str = AUTO
    ) -> None:
        """Without `costs`, swapping counts as cheaper."""
        self._kv = kv
        self.fair_share = fair_share
        self.costs = costs
        self._mode = mode
        self.num_swapped = self.num_recomputed = self.num_reclaimed = 0
        self.num_recomputed_tokens = 0
        self.recompute_s = self.swap_out_s = self.swap_in_s = 0.0
        self._step = 0
        self._resumed_at_step: WeakKeyDictionary[SequenceGroup, int] = WeakKeyDictionary()
        self._num_promised = 0
        self._num_running = 1
        num_blocks = kv.pool.num_blocks
        self._low_watermark = max(num_blocks // 32, min(64, num_blocks // 4))
        self._num_saved_target = max(self._low_watermark, num_blocks // 8)

    @property
    def num_preemptions(self) -> int:
        return self.num_swapped + self.num_recomputed

    def start_step(self, num_running: int) -> None:
        self._step += 1
        self._num_promised = 0
        self._num_running = max(1, num_running)

    def mark_resumed(self, group: SequenceGroup) -> None:
        if group in self._resumed_at_step:
            self._resumed_at_step[group] = self._step

    def make_room(self, num_blocks: int, claimant: Sequence, running: list[Sequence]) -> list[SequenceGroup]:
        """Preempt until `num_blocks` are available, now or after copies, or the claimant itself is preempted. Return
        the victims: WAITING and removed from `running`."""
        victims: list[SequenceGroup] = []
        while claimant.group not in victims and self.num_available_soon() < num_blocks:
            group = self._next_victim(running)
            self._preempt(group, running)
            victims.append(group)
        if claimant.group not in victims and self._kv.pool.num_available < num_blocks:
            self._num_promised += num_blocks
        return victims

    def reclaim(self, groups: Iterable[SequenceGroup], running: list[Sequence]) -> None:
        for group in groups:
            self._preempt(group, running)
            self.num_reclaimed += 1

    def is_preemptible(self, group: SequenceGroup) -> bool:
        return self._step - self._resumed_at_step.get(group, -math.inf) > PROTECTED_STEPS

    def save_ahead(self, running: list[Sequence]) -> None:
        """Copy likely victims' blocks to the host, unless copies are in flight."""
        kv = self._kv
        if kv.host is None or kv.host.num_swapping_out or not running:
            return
        wanted = min(self._num_saved_target, kv.host.pool.num_blocks // 2) - kv.pool.num_free - kv.pool.num_saved
        if wanted > 0 and (kv.shares_prefixes or self._mode != RECOMPUTE):
            kv.save_cached(min(wanted, kv.host.pool.num_available))
        if kv.pool.num_available < self._low_watermark:
            group = self._next_victim(running)
            if self._prefers_swap(group):
                for sequence in group.live:
                    kv.save_to_host(sequence)

    def on_transfer(self, done: FinishedTransfer) -> None:
        if done.is_out:
            self.swap_out_s += done.seconds
        else:
            self.swap_in_s += done.seconds
        if self.costs is not None:
            self.costs.on_transfer(done.num_blocks, done.seconds, out=done.is_out)

    def on_step(self, plan: StepPlan, seconds: float, num_recomputed_tokens: int = 0) -> None:
        if num_recomputed_tokens:
            self.num_recomputed_tokens += num_recomputed_tokens
            self.recompute_s += seconds * num_recomputed_tokens / plan.num_tokens
        if self.costs is None:
            return
        spans = []
        if plan.chunks[-1].length > 1:  # longer chunks come last
            spans = [(chunk.start, chunk.end) for chunk in plan.chunks if chunk.length > 1 and not chunk.drafts]
        if spans:
            self.costs.on_prefill_step(spans, seconds, with_decodes=len(spans) < len(plan.chunks))
        else:
            self.costs.on_decode_step(seconds)

    def num_available_soon(self) -> int:
        """Return the blocks available now or after copies, minus promised ones."""
        return self._kv.pool.num_available + self._kv.num_returning_blocks() - self._num_promised

    def _next_victim(self, running: list[Sequence]) -> SequenceGroup:
        groups = list(dict.fromkeys(sequence.group for sequence in reversed(running)))
        others = groups[:-1] or groups  # the oldest only if alone
        others = self.fair_share.block_holders_over_share(others, running) or others
        return next(filter(self.is_preemptible, others), others[0])

    def _preempt(self, group: SequenceGroup, running: list[Sequence]) -> None:
        swaps = self._prefers_swap(group)
        self.fair_share.on_preempted(group)
        for sequence in group.live:
            running.remove(sequence)
            sequence.num_tokens_before_preemption = max(
                sequence.num_tokens_before_preemption, sequence.num_computed_tokens
            )
            if swaps:
                self._kv.swap_out(sequence)
            else:
                self._kv.release(sequence)
            sequence.set_status(SequenceStatus.WAITING)
        group.stop_sharing()
        self._resumed_at_step[group] = self._step
        self.num_swapped += swaps
        self.num_recomputed += not swaps

    def _prefers_swap(self, group: SequenceGroup) -> bool:
        host = self._kv.host
        if host is None or self._mode == RECOMPUTE:
            return False
        lost = self._kv.swap_footprint(group.live)
        if not lost.num_cached or lost.num_to_save > host.pool.num_available:
            return False
        if self.costs is None or self._mode == SWAP:
            return True
        size = self._kv.block_size
        first, end = (count * size for count in (lost.num_cached - lost.num_exclusive, lost.num_cached))
        return self.costs.swap_s(lost.num_to_save, lost.num_exclusive, self._load) < self.costs.recompute_s(first, end)

    def should_swap_in(self, num_tokens: int, num_blocks: int) -> bool:
        """Return True if swapping in is cheaper; see PrefixCache.match."""
        if self.costs is None or self._mode == SWAP:
            return True
        end = num_tokens + num_blocks * self._kv.block_size
        return self.costs.swap_s(0, num_blocks, self._load) < self.costs.recompute_s(num_tokens, end)

    @property
    def _load(self) -> EngineLoad:
        host = self._kv.host
        if host is None:
            return EngineLoad(num_running=self._num_running)
        return EngineLoad(
            num_running=self._num_running, num_swapping_out=host.num_swapping_out, num_swapping_in=host.num_swapping_in
        )
