"""The builds of `gemv.cu`, and which of them suits a device."""

from __future__ import annotations

from typing import NamedTuple


class GemvBuild(NamedTuple):
    """The sizes that gemv.cu is built with, and how many of its blocks an SM holds."""

    warps: int
    row_tiles: int
    span: int
    stages: int
    blocks_per_sm: int
    col_tiles: int = 1

    @property
    def max_rows(self) -> int:
        """Rows of x that it takes."""
        return 8 * self.col_tiles

    @property
    def defines(self) -> dict[str, int]:
        """The kernel's macros, by name."""
        sizes = {"WARPS": self.warps, "ROW_TILES": self.row_tiles, "COL_TILES": self.col_tiles}
        return sizes | {"SPAN": self.span, "STAGES": self.stages}

    @property
    def shared_bytes(self) -> int:
        """SHARED_BYTES of the kernel: the ring of each warp, and two sets of sums."""
        rows = 16 * self.row_tiles
        return self.warps * self.stages * rows * self.span * 2 + 2 * self.warps * self.max_rows * rows * 4


GEMV_BUILDS = (
    GemvBuild(16, 1, 128, 2, 1),
    GemvBuild(4, 1, 128, 3, 4),
    GemvBuild(8, 2, 128, 2, 1, col_tiles=2),
)
"""In the order of preference. The second is for devices with less shared memory, where no two kernels overlap."""


def gemv_build(num_rows: int, max_shared_bytes: int) -> int | None:
    """Which of GEMV_BUILDS all products of so many rows take on a device with this much shared memory a block; None
    where no build takes so many.

    One for all: blocks of neighbouring kernels share an SM while one gives way to the other, and builds that differ
    get in each other's way (on an H200 up to 6 us a layer, which measuring one product by itself does not show). The
    first was the best of eleven for the matrices of a layer of Llama-3.1-8B, in turn and between their small kernels.
    """
    for index, build in enumerate(GEMV_BUILDS):
        if num_rows <= build.max_rows and build.shared_bytes <= max_shared_bytes:
            return index
    return None
