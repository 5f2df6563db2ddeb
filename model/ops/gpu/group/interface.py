"""Interfaces between a group's parts; tests implement them without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, PartOps


class GroupLauncher(KernelLauncher, Protocol):
    """A rank as used by collectives: `CudaRank`."""

    label: str  # "cuda:1, NVIDIA H200, 0000:5D:00.0"

    @property
    def is_capturing(self) -> bool: ...

    def use(self) -> None: ...

    def shared(self, num_bytes: int) -> Array: ...

    def load_kernel(self, name: str, **defines: int) -> bool: ...

    def synchronize(self) -> None: ...


class GroupRank(PartOps, GroupLauncher, Protocol):
    """A rank as used by `CudaGroupOps`: `CudaRank`."""

    def begin_capture(self) -> None: ...

    def end_capture(self) -> Callable[[], None]: ...

    def compile_ahead(self, work: Callable[[], None], others: Sequence[Any] = ()) -> None: ...

    def share_tuning(self, other: Any) -> None: ...


class ShareMover(Protocol):
    """Moves bytes between the ranks on their streams, all at once: `NcclMover`."""

    def exchange(self, parts: Sequence[Array], into: Sequence[Array], num_bytes: int) -> None:
        """Copy at most `num_bytes` bytes of each rank's part, from byte `r * num_bytes` on, to rank r. Rank r receives
        those of rank s at `into[s * num_bytes]`; into is uint8[ranks * num_bytes]."""

    def gather(self, arrays: Sequence[Array], num_bytes: int) -> None:
        """Copy bytes `r * num_bytes` to `(r + 1) * num_bytes` of each rank r to all; arrays are uint8[ranks *
        num_bytes]."""
