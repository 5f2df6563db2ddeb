"""Contract of the cache's second tier, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transfer(Protocol):
    """A copy of blocks to or from the host."""

    def is_done(self) -> bool:
        """Return whether the copy is done, without waiting."""

    def wait(self) -> None:
        """Wait for the copy."""

    def seconds(self) -> float:
        """Return the device time of a finished copy."""


class HostBlocks(Protocol):
    """Host memory for blocks of one cache.

    A transfer begins after all work submitted before it. Transfers of one direction run in order; the two directions
    and later work run concurrently. Blocks must not be used until their transfer is done.
    """

    @property
    def num_ready(self) -> int:
        """Number of usable blocks, 0..num_ready - 1; grows in the background."""

    @property
    def failure(self) -> Exception | None:
        """Error that stopped this growth."""

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> Transfer:
        """Copy cache blocks to as many host blocks."""

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host blocks to as many cache blocks."""

    def close(self) -> None:
        """Free the memory once all transfers are done."""
