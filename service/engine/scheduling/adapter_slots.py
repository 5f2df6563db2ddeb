"""Assignment of adapters to device slots.

A group runs only while its adapter has a slot; the slot stays reserved from the start of the load until the group runs.
MAX_OVERTAKEN younger groups may overtake a group without a slot. Then one slot is drained: younger groups neither join
its adapter nor take a free slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from model.weights.lora.adapter import LoraAdapter
from service.engine.sequence import Sequence, SequenceGroup

MAX_OVERTAKEN = 16
"""Younger groups with other adapters that may start before a group waiting for a slot."""


class AdapterLoad(NamedTuple):
    """Adapter to copy into a slot that the current plan does not use."""

    slot: int
    adapter: LoraAdapter
    is_unused: bool  # by steps in flight (at most the last planned one)


class AdapterSlotPool:
    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # digest -> slot, least recently used first
        self._held: Counter[str] = Counter()  # running groups by digest
        self._held_before: Counter[str] = Counter()  # in the previous step
        self._loading: set[int] = set()  # slots being written
        self._reserved: dict[str, SequenceGroup] = {}  # digest -> group the slot is reserved for
        self._loads: list[AdapterLoad] = []
        self._starving: SequenceGroup | None = None  # oldest group waiting for a slot
        self._num_overtaken = 0
        self._drained = ""  # digest losing its slot to the starving group
        self.num_open = 0  # groups with an adapter

    def add_group(self, group: SequenceGroup) -> None:
        self.num_open += bool(group.adapter_key)

    def remove_group(self, group: SequenceGroup) -> None:
        self.num_open -= bool(group.adapter_key)
        if self._reserved.get(group.adapter_key) is group:
            del self._reserved[group.adapter_key]
        if group is self._starving:
            self._forget_starving()

    def start_step(self, running: Iterable[Sequence]) -> None:
        """Count running groups per adapter."""
        self._held_before = self._held
        groups = {sequence.group for sequence in running}
        self._held = Counter(group.adapter_key for group in groups if group.adapter_key)
        if self._drained not in self._held:
            self._drained = ""

    def admissible(self, waiting: Iterable[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Yield groups that need no slot or have one, and groups whose adapter is still being read. Start the other
        loads that find a slot."""
        for group in waiting:
            if not group.is_loaded:
                yield group
            elif self._can_start(group):
                if self._is_in_slot(group):
                    yield group
            elif self._starving is None or group.arrival < self._starving.arrival:
                self._forget_starving()
                self._starving = group

    def take(self, group: SequenceGroup) -> None:
        """Assign an admissible group its slot."""
        digest = group.adapter_key
        if not digest:
            return
        self._slot_of.move_to_end(digest)
        self._reserved.pop(digest, None)
        self._held[digest] += 1
        group.adapter_slot = self._slot_of[digest]
        self._count_overtaking(group)

    def drain_loads(self) -> tuple[AdapterLoad, ...]:
        """Return loads to start; `finish_load` completes each."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def finish_load(self, slot: int) -> None:
        self._loading.remove(slot)

    def _is_in_slot(self, group: SequenceGroup) -> bool:
        """Return True if the group needs no adapter or its slot holds it; start the load of an adapter without a
        slot."""
        digest = group.adapter_key
        if not digest or group.adapter is None:
            return True
        slot = self._slot_of.get(digest)
        if slot is None:
            slot, is_unused = self._free_slot()
            self._slot_of[digest] = slot
            self._loading.add(slot)
            self._loads.append(AdapterLoad(slot, group.adapter, is_unused))
            if self._starving is not None and self._starving.adapter_key == digest:
                self._forget_starving()
        if digest not in self._held:
            self._reserved.setdefault(digest, group)
        return slot not in self._loading

    def _can_start(self, group: SequenceGroup) -> bool:
        digest, starving = group.adapter_key, self._starving
        if not digest:
            return True
        is_held_back = (
            starving is not None and self._num_overtaken >= MAX_OVERTAKEN and group.arrival > starving.arrival
        )
        if digest in self._held:
            return not (is_held_back and digest == self._drained)
        if digest in self._reserved:
            return True
        return (digest in self._slot_of or self._has_free_slot) and not is_held_back

    def _free_slot(self) -> tuple[int, bool]:
        """Return a slot and whether no step in flight uses it."""
        if len(self._slot_of) < self.num_slots:
            return len(self._slot_of), True
        digest = next(self._unused())
        return self._slot_of.pop(digest), digest not in self._held_before

    @property
    def _has_free_slot(self) -> bool:
        return len(self._slot_of) < self.num_slots or next(self._unused(), None) is not None

    def _unused(self) -> Iterator[str]:
        """Yield digests whose slots may be reused, least recently used first."""
        for digest, slot in self._slot_of.items():
            if digest not in self._held and digest not in self._reserved and slot not in self._loading:
                yield digest

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
            if group.adapter_key and group.adapter_slot in self._loading:
                raise AssertionError(f"{group.request_id} runs before its adapter is loaded")
