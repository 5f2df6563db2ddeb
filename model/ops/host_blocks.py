"""The contract of the cache's second tier: blocks in host memory, and copies in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transfer(Protocol):
    """A copy of blocks between a cache and the host."""

    def is_done(self) -> bool:
        """Whether it is done; does not wait."""

    def wait(self) -> None:
        """Wait until it is done."""

    def seconds(self) -> float:
        """Device time of the copy; it must be done."""


class HostBlocks(Protocol):
    """Host memory for blocks of one cache, and the copies between the two.

    A transfer begins once all work submitted before it is done. Transfers of one direction run in order; the two
    directions and later work run concurrently. The caller must not use the blocks until their transfer is done.
    """

    num_ready: int  # blocks 0..num_ready - 1 may be used; grows in the background
    failure: Exception | None  # why it stopped growing early

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> Transfer:
        """Copy blocks of the cache to as many host blocks."""

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host blocks to as many blocks of the cache."""

    def close(self) -> None:
        """Free the memory once all transfers are done."""
