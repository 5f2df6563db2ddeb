"""How large the cases of `quire bench kernels` are, on a GPU and on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

Batch = tuple[tuple[int, int], ...]
"""(sequences, tokens each), groups of them beside each other."""


@dataclass(frozen=True)
class Sizes:
    """How large the cases are. Sets of inputs are taken by turns until they fill `rotated_bytes`: on a GPU more than
    twice the largest L2; on a CPU small cases stay in its cache, as they do in use."""

    num_tokens: int
    rows: tuple[int, ...]
    decode: tuple[Batch, ...]
    prefill: tuple[tuple[int, int], ...]  # (prompts, tokens each)
    tails: tuple[tuple[int, int], ...]  # (tokens of one prompt, those before them, which are known)
    sampled: tuple[int, ...]
    copied_blocks: int
    rotated_bytes: int

    @property
    def cache_tokens(self) -> int:
        tails = max(map(sum, self.tails))
        return max(tails, *(sum(map(math.prod, batch)) for batch in (*self.decode, self.prefill)))


GPU_SIZES = Sizes(
    num_tokens=8192,
    rows=(1, 16, 64, 256, 512, 8192),
    decode=(((32, 4096),), ((128, 1024),), ((256, 512),), ((1, 32768),), ((1, 131072), (31, 4096))),
    prefill=((4, 1024), (1, 4096), (1, 16384)),
    tails=((64, 2048),),
    sampled=(64, 256),
    copied_blocks=2048,
    rotated_bytes=256 << 20,
)
CPU_SIZES = Sizes(
    num_tokens=256,
    rows=(1, 16, 64),
    decode=(((1, 512),), ((16, 256),), ((1, 512), (3, 128))),
    prefill=((1, 256),),
    tails=((16, 256),),
    sampled=(16,),
    copied_blocks=16,
    rotated_bytes=4 << 20,
)
