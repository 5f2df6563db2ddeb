"""Fair shares of sequences and blocks per tenant.

Holdings over a share are reclaimed once another tenant can start within its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from service.engine.kv.kv_manager import KVManager
from service.engine.sequence import Sequence, SequenceGroup
from service.fair_share import fair_share

RECLAIM_DIVISOR = 16
"""Maximum groups reclaimed per step: `max_num_seqs` / 16."""
COUNT_EVERY_STEPS = 8
"""Counting blocks takes up to 1 ms."""


class Shares:
    def __init__(self, num_in_all: int, held: Counter[str], wanted: Counter[str]):
        """`wanted` includes `held`."""
        self.held = held
        self.share = fair_share(num_in_all, wanted.values())
        self._equal_part = max(1, num_in_all // max(1, len(wanted)))

    def fits(self, tenant: str, count: int) -> bool:
        """Return True if the tenant stays within its share with `count` more, or holds none."""
        held = self.held[tenant]
        return held == 0 or held + count <= self.share

    def stays_over_share(self, tenant: str, count: int, least: int) -> bool:
        """Return True if the tenant keeps an equal part, and `least`, without `count`."""
        return self.held[tenant] - count >= max(self._equal_part, least)


class FairShare:
    def __init__(self, kv: KVManager, max_num_seqs: int):
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self._num_groups: Counter[str] = Counter()
        self._num_blocks: Counter[str] = Counter()
        self._num_steps_since, self._num_counted = COUNT_EVERY_STEPS, 0

    @property
    def has_several_tenants(self) -> bool:
        return len(self._num_groups) > 1

    def add_group(self, group: SequenceGroup) -> None:
        self._num_groups[group.tenant] += 1

    def remove_group(self, group: SequenceGroup) -> None:
        self._num_groups[group.tenant] -= 1
        if not self._num_groups[group.tenant]:
            del self._num_groups[group.tenant]

    def next_group(self, waiting: Iterable[SequenceGroup], num_running: Mapping[str, int]) -> SequenceGroup | None:
        """Return the oldest ready group of the tenant with the fewest running sequences. `num_running`: by tenant."""
        ready = (group for group in waiting if group.is_ready)
        if not self.has_several_tenants:
            return next(ready, None)
        first: dict[str, SequenceGroup] = {}
        for group in ready:
            first.setdefault(group.tenant, group)
        return min(first.values(), key=lambda one: (num_running.get(one.tenant, 0), one.arrival), default=None)

    def num_running(self, running: Iterable[Sequence]) -> Counter[str]:
        return Counter(sequence.group.tenant for sequence in running)

    def sequence_shares(self, waiting: Iterable[SequenceGroup], running: Iterable[Sequence]) -> Shares:
        held = self.num_running(running)
        wanted = Counter(held)
        for group in waiting:
            wanted[group.tenant] += num_sequences_of(group)
        return Shares(self.max_num_seqs, held, wanted)

    def block_shares(self, waiting: Iterable[SequenceGroup], running: list[Sequence]) -> Shares:
        """Return block shares; holdings may be several steps old."""
        num_changed = abs(len(running) - self._num_counted)
        if self._num_steps_since >= COUNT_EVERY_STEPS or num_changed * COUNT_EVERY_STEPS > len(running):
            self._count_blocks(running)
        held = Counter(self._num_blocks)
        wanted = Counter(held)
        for group in waiting:
            wanted[group.tenant] += self.num_uncached_blocks(group)
        return Shares(self.kv.pool.num_blocks, held, wanted)

    def start_step(self) -> None:
        self._num_steps_since += 1

    def on_preempted(self, group: SequenceGroup) -> None:
        self._num_blocks[group.tenant] -= num_blocks_of(group)

    def _count_blocks(self, running: list[Sequence]) -> None:
        tables: dict[str, set[int]] = {}
        for sequence in running:
            tables.setdefault(sequence.group.tenant, set()).update(sequence.block_table)
        self._num_blocks = Counter({tenant: len(blocks) for tenant, blocks in tables.items()})
        self._num_steps_since, self._num_counted = 0, len(running)

    def block_holders_over_share(self, groups: list[SequenceGroup], running: list[Sequence]) -> list[SequenceGroup]:
        """Return the groups that the tenant with the most blocks can lose and keep an equal part."""
        if not self.has_several_tenants:
            return []
        shares = self.block_shares((), running)
        tenant = max(shares.held, key=shares.held.__getitem__, default=None)
        if tenant is None:
            return []
        own = [group for group in groups if group.tenant == tenant]
        return [group for group in own if shares.stays_over_share(tenant, num_blocks_of(group), 0)]

    def groups_over_share(
        self,
        waiting: list[SequenceGroup],
        running: list[Sequence],
        num_free_blocks: int,
        is_preemptible: Callable[[SequenceGroup], bool],
    ) -> list[SequenceGroup]:
        """Return groups to preempt for waiting groups within their shares: a few, or as many as one waiting group
        needs.

        The youngest come first, of the tenant furthest over its share; groups not `is_preemptible` last; a tenant's
        oldest never.
        """
        reclaimed = _Reclaim(self, waiting, running, num_free_blocks, is_preemptible)
        most = max(1, self.max_num_seqs // RECLAIM_DIVISOR)
        left, found = list(waiting), []
        for _ in range(most):
            group = self.next_group(left, reclaimed.sequences.held)
            if group is None or group.has_pending_tokens:
                break
            groups_over_share = reclaimed.groups_for(group)
            if groups_over_share is None:
                break
            found += groups_over_share
            if len(found) >= most:
                break
            left.remove(group)
        return found

    def num_uncached_blocks(self, group: SequenceGroup) -> int:
        """Return the blocks the group needs without cache hits."""
        leader, *others = group.live
        if not others:
            return -(-leader.num_tokens // self.kv.block_size)
        group.wait_for_leader()
        whole = -(-leader.num_tokens // self.kv.block_size) + sum(map(self.kv.num_missing_for_all, others))
        group.stop_sharing()
        return whole


class _Reclaim:
    def __init__(
        self,
        fair_share: FairShare,
        waiting: list[SequenceGroup],
        running: list[Sequence],
        num_free_blocks: int,
        is_preemptible: Callable[[SequenceGroup], bool],
    ):
        self._fair_share = fair_share
        self._waiting = waiting
        self._running = running
        self._is_preemptible = is_preemptible
        self._free_seqs = fair_share.max_num_seqs - len(running)
        self._free_blocks = num_free_blocks
        self.sequences = fair_share.sequence_shares(waiting, running)

    @cached_property
    def _groups(self) -> list[SequenceGroup]:
        groups = list(dict.fromkeys(sequence.group for sequence in reversed(self._running)))
        oldest = {group.tenant: group for group in groups}
        return [group for group in groups if group is not oldest[group.tenant]]

    @cached_property
    def _blocks(self) -> Shares:
        return self._fair_share.block_shares(self._waiting, self._running)

    def groups_for(self, newcomer: SequenceGroup) -> list[SequenceGroup] | None:
        """Return groups to preempt; None if the newcomer cannot start within its share."""
        num_seqs, num_blocks = num_sequences_of(newcomer), self._fair_share.num_uncached_blocks(newcomer)
        if not self.sequences.fits(newcomer.tenant, num_seqs):
            return None
        if num_blocks > self._free_blocks and not self._blocks.fits(newcomer.tenant, num_blocks):
            return None
        found = []
        while num_seqs > self._free_seqs or num_blocks > self._free_blocks:
            if num_seqs > self._free_seqs:
                group_over_share = self._group_over_share(self.sequences, num_sequences_of, newcomer.tenant, num_seqs)
            else:
                group_over_share = self._group_over_share(self._blocks, num_blocks_of, newcomer.tenant, num_blocks)
            if group_over_share is None:
                return None
            self._reclaim_group(group_over_share)
            found.append(group_over_share)
        self.sequences.held[newcomer.tenant] += num_seqs
        self._free_seqs -= num_seqs
        self._free_blocks -= num_blocks
        return found

    def _group_over_share(
        self, shares: Shares, size_of: Callable[[SequenceGroup], int], tenant: str, count: int
    ) -> SequenceGroup | None:
        least = min(shares.share, shares.held[tenant] + count)  # of the newcomer's tenant
        eligible = [group for group in self._groups if shares.stays_over_share(group.tenant, size_of(group), least)]
        return max(eligible, key=lambda one: (self._is_preemptible(one), shares.held[one.tenant]), default=None)

    def _reclaim_group(self, group: SequenceGroup) -> None:
        self._groups.remove(group)
        self.sequences.held[group.tenant] -= num_sequences_of(group)
        self._blocks.held[group.tenant] -= num_blocks_of(group)
        self._free_seqs += num_sequences_of(group)
        self._free_blocks += self._fair_share.kv.num_freed_blocks(group.live)


def num_sequences_of(group: SequenceGroup) -> int:
    return len(group.live)


def num_blocks_of(group: SequenceGroup) -> int:
    """Count the group's blocks; shared blocks count once."""
    first, *others = group.live
    return len(set(first.block_table).union(*(one.block_table for one in others))) if others else len(first.block_table)
