"""Who gives up its blocks when they run out, and what becomes of it.

A victim is a whole group: its branches lose their blocks together and wait at the head of the queue. When it returns,
its prompt and all tokens it has already given are computed again; what its branches have in common, once.
"""

from __future__ import annotations

from service.engine.kv_manager import KVManager
from service.engine.sequence import Sequence, SequenceGroup, State


class Preemption:
    """The youngest leaves first, so that the oldest always comes to its end."""

    def __init__(self, kv: KVManager):
        self._kv = kv
        self.num_preemptions = 0

    def make_room(self, num_blocks: int, claimant: Sequence, running: list[Sequence]) -> list[SequenceGroup]:
        """Preempt from the young end of `running` until `num_blocks` are free or the claimant itself had to go.

        Returns the victims, youngest first; their sequences are WAITING and no longer in `running`.
        """
        victims: list[SequenceGroup] = []
        while self._kv.pool.num_available < num_blocks and claimant.group not in victims:
            group = running[-1].group
            while running and running[-1].group is group:
                sequence = running.pop()
                self._kv.release(sequence)
                sequence.become(State.WAITING)
            group.disband()
            victims.append(group)
        self.num_preemptions += len(victims)
        return victims
