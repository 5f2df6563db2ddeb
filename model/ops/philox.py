"""The counter-based random numbers behind sampling: Philox4x32-10 (Salmon et al., SC 2011).

A number depends on (seed, branch, position, token id) alone: a request that moves to another worker, joins another
batch or is computed again draws the same noise.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_words(counters: np.ndarray, seed: int) -> np.ndarray:
    """counters uint32[N, 4], 64-bit seed -> uint32[N, 4] random words."""
    words = [counters[:, i].astype(np.uint64) for i in range(4)]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _HALF) ^ words[1] ^ np.uint64(keys[0]),
            second & _LOW,
            (first >> _HALF) ^ words[3] ^ np.uint64(keys[1]),
            first & _LOW,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    return np.stack(words, axis=1).astype(np.uint32)


def gumbel_noise(token_ids: np.ndarray, seed: int, position: int, branch: int) -> np.ndarray:
    """Standard Gumbel noise float32[N] of the given token ids, as `Ops.sample` defines it."""
    groups, index = np.unique(token_ids // 4, return_inverse=True)
    counters = np.zeros((len(groups), 4), np.uint32)
    counters[:, 0], counters[:, 1], counters[:, 2] = groups, position, branch
    words = philox_words(counters, seed)[index, token_ids % 4]
    uniform = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
    return (-np.log(-np.log(uniform))).astype(np.float32)
