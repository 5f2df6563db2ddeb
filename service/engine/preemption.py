"""Who gives up its blocks when they run out, and what becomes of it.

A victim loses its blocks and waits at the head of the queue; when it returns, its prompt and all tokens it has already
given are computed again.
"""

from __future__ import annotations

from service.engine.kv_manager import KVManager
from service.engine.sequence import Sequence, State


class Preemption:
    """The youngest leaves first, so that the oldest always comes to its end."""

    def __init__(self, kv: KVManager):
        self._kv = kv
        self.num_preemptions = 0

    def make_room(self, num_blocks: int, claimant: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Preempt from the young end of `running` until `num_blocks` are free or the claimant itself had to go.

        Returns the victims, youngest first; they are WAITING and no longer in `running`.
        """
        victims = []
        while self._kv.pool.num_available < num_blocks and claimant not in victims:
            victim = running.pop()
            self._kv.release(victim)
            victim.become(State.WAITING)
            victims.append(victim)
        self.num_preemptions += len(victims)
        return victims
