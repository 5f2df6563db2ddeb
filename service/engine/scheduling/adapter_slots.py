"""The adapters in the device's slots.

A group runs only while its adapter has a slot. A group without one may be overtaken MAX_OVERTAKEN times.
Then one slot is reserved: younger groups neither join it nor take a free slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from service.engine.sequence import Sequence, SequenceGroup
from service.engine.step import AdapterLoad

MAX_OVERTAKEN = 16
"""Limit of groups with other adapters that may start before a group that waits for a slot."""


class AdapterSlotPool:
    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # digest -> slot, the last used at the end
        self._held: Counter[str] = Counter()  # running groups by digest
        self._loads: list[AdapterLoad] = []
        self._starving: SequenceGroup | None = None  # the oldest that waits for a slot
        self._num_overtaken = 0
        self._drained = ""  # digest whose slot it gets
        self.num_open = 0  # groups with an adapter

    def add_group(self, group: SequenceGroup) -> None:
        self.num_open += bool(group.adapter_key)

    def remove_group(self, group: SequenceGroup) -> None:
        self.num_open -= bool(group.adapter_key)
        if group is self._starving:
            self._forget_starving()

    def start_step(self, running: Iterable[Sequence]) -> None:
        """Count the running groups of each adapter."""
        groups = {sequence.group for sequence in running}
        self._held = Counter(group.adapter_key for group in groups if group.adapter_key)
        if self._drained not in self._held:
            self._drained = ""

    def admissible(self, waiting: Iterable[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Yield groups that can have a slot in this step."""
        for group in waiting:
            if not group.is_loaded or self._can_start(group):
                yield group
            elif self._starving is None or group.arrival < self._starving.arrival:
                self._forget_starving()
                self._starving = group

    def take(self, group: SequenceGroup) -> None:
        """Give an admissible group its slot; record a load if needed."""
        if group.adapter is None:
            return
        digest = group.adapter_key
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self._free_slot()
            self._slot_of[digest] = slot
            self._loads.append(AdapterLoad(slot, group.adapter))
        self._slot_of.move_to_end(digest)
        self._held[digest] += 1
        group.adapter_slot = slot
        self._count_overtaking(group)

    def drain_loads(self) -> tuple[AdapterLoad, ...]:
        loads, self._loads = tuple(self._loads), []
        return loads

    def _can_start(self, group: SequenceGroup) -> bool:
        digest, starving = group.adapter_key, self._starving
        if not digest:
            return True
        is_held_back = (
            starving is not None and self._num_overtaken >= MAX_OVERTAKEN and group.arrival > starving.arrival
        )
        if digest in self._held:
            return not (is_held_back and digest == self._drained)
        return len(self._held) < self.num_slots and not is_held_back

    def _free_slot(self) -> int:
        if len(self._slot_of) < self.num_slots:
            return len(self._slot_of)
        unused = next(digest for digest in self._slot_of if digest not in self._held)
        return self._slot_of.pop(unused)

    def _count_overtaking(self, group: SequenceGroup) -> None:
        starving = self._starving
        if starving is None:
            return
        if group is starving or group.adapter_key == starving.adapter_key:
            self._forget_starving()
        elif group.arrival > starving.arrival:
            self._num_overtaken += 1
            if self._num_overtaken >= MAX_OVERTAKEN and not self._drained:
                self._drained = min(self._held, key=lambda digest: (self._held[digest], digest))

    def _forget_starving(self) -> None:
        self._starving, self._num_overtaken, self._drained = None, 0, ""

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        slots = list(self._slot_of.values())
        if len(set(slots)) < len(slots) or len(slots) > self.num_slots:
            raise AssertionError("two adapters have one slot")
        for sequence in running:
            group = sequence.group
            if group.adapter_key and self._slot_of.get(group.adapter_key) != group.adapter_slot:
                raise AssertionError(f"{group.request_id} runs without its adapter")
