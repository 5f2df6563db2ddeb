"""The cache's second tier of a group: each rank keeps its part of every block."""

from __future__ import annotations

from collections.abc import Sequence

from model.ops.host_blocks import HostBlocks, Transfer


class GroupTransfer:
    """Done when every rank's part is."""

    def __init__(self, transfers: Sequence[Transfer]):
        self._transfers = transfers

    def is_done(self) -> bool:
        return all(transfer.is_done() for transfer in self._transfers)

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def seconds(self) -> float:
        """Return the slowest rank's time: they copy at once, each over its own bus."""
        return max(transfer.seconds() for transfer in self._transfers)


class GroupHostBlocks:
    def __init__(self, ranks: Sequence[HostBlocks]):
        self._ranks = ranks

    @property
    def num_ready(self) -> int:
        return min(rank.num_ready for rank in self._ranks)

    @property
    def failure(self) -> Exception | None:
        return next((rank.failure for rank in self._ranks if rank.failure is not None), None)

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> GroupTransfer:
        return GroupTransfer([rank.copy_out(blocks, host_blocks) for rank in self._ranks])

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> GroupTransfer:
        return GroupTransfer([rank.copy_in(host_blocks, blocks) for rank in self._ranks])

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
