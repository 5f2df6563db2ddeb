"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

A number depends on (seed, branch, position, token id) alone, not on worker, batch or preemption.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_words(counters: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """counters uint32[N, 4], seeds uint64[N] -> words uint32[N, 4]."""
    words = [counters[:, i].astype(np.uint64) for i in range(4)]
    keys = [seeds & _LOW, seeds >> _HALF]
    for _ in range(10):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _HALF) ^ words[1] ^ keys[0],
            second & _LOW,
            (first >> _HALF) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(key + step) & _LOW for key, step in zip(keys, _WEYL, strict=True)]
    return np.stack(words, axis=1).astype(np.uint32)


def gumbel_noise(token_ids: np.ndarray, seeds: np.ndarray, positions: np.ndarray, branches: np.ndarray) -> np.ndarray:
    """Return Gumbel noise float32[N] of `Ops.sample`; arrays are [N], seeds uint64. Neighbours share words."""
    groups = token_ids // 4
    is_new = np.ones(len(token_ids), bool)
    is_new[1:] = groups[1:] != groups[:-1]
    for column in (positions, branches, seeds):
        is_new[1:] |= column[1:] != column[:-1]
    counters = np.zeros((np.count_nonzero(is_new), 4), np.uint32)
    counters[:, 0], counters[:, 1], counters[:, 2] = groups[is_new], positions[is_new], branches[is_new]
    words = philox_words(counters, seeds[is_new])[np.cumsum(is_new) - 1, token_ids % 4]
    uniform = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise.astype(np.float32)
