"""The contract of a cache's second tier: blocks in the host's memory, and the copies there and back.

`numpy_host_blocks` and `cuda_host_blocks` keep it; `Ops.host_blocks` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transfer(Protocol):
    """Blocks on their way between a cache and the host."""

    def is_done(self) -> bool:
        """Whether all of them have arrived; waits for nothing."""

    def wait(self) -> None:
        """Wait until they have."""

    def seconds(self) -> float:
        """The device's time from the first byte to the last; once it is done."""


class HostBlocks(Protocol):
    """Memory of the host for blocks of one cache, and the copies between the two.

    A transfer begins when all work that was handed to the `Ops` before it is done. Those of one direction go in their
    order; the two directions and later work of the `Ops` go on side by side. Whoever asks for a transfer leaves its
    blocks alone until it is done.
    """

    num_ready: int  # blocks 0..num_ready - 1 may be used; it grows up to what was asked for, in the background
    failure: Exception | None  # why it grows no more, where it ended early

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> Transfer:
        """The host's blocks become what these blocks of the cache are; as many of the one as of the other."""

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """These blocks of the cache become what the host's blocks are."""

    def close(self) -> None:
        """Give the memory back, once all transfers are done."""
