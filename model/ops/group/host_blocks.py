"""Second tier of a group's cache: each rank keeps its part of every block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from model.ops.group.turns import in_turn
from model.ops.host_blocks import HostBlocks, Transfer
from model.ops.interface import PartOps


class GroupTransfer:
    """`Transfer` that is done when every rank's part is."""

    def __init__(self, transfers: Sequence[Transfer]):
        self._transfers = transfers

    def is_done(self) -> bool:
        return all(transfer.is_done() for transfer in self._transfers)

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def seconds(self) -> float:
        """Return the slowest rank's time; all copy at once, each over its own bus."""
        return max(transfer.seconds() for transfer in self._transfers)


class GroupHostBlocks:
    def __init__(self, ranks: Sequence[PartOps], own: Sequence[HostBlocks]):
        self._ranks = ranks
        self._own = own

    @property
    def num_ready(self) -> int:
        return min(own.num_ready for own in self._own)

    @property
    def failure(self) -> Exception | None:
        return next((own.failure for own in self._own if own.failure is not None), None)

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> GroupTransfer:
        return GroupTransfer([own.copy_out(blocks, host_blocks) for own in self._turns()])

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> GroupTransfer:
        return GroupTransfer([own.copy_in(host_blocks, blocks) for own in self._turns()])

    def close(self) -> None:
        for own in self._own:
            own.close()

    def _turns(self) -> Iterator[HostBlocks]:
        return (self._own[rank] for rank, _ in in_turn(self._ranks))
