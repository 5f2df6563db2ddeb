"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

A number depends on (seed, branch, position, token id) alone, not on worker, batch or preemption.
"""

from __future__ import annotations

import numpy as np

FEW = 8
"""Count up to which plain integers are faster than arrays."""
_FIRST, _SECOND = 0xD2511F53, 0xCD9E8D57
_MULTIPLIERS = (np.uint64(_FIRST), np.uint64(_SECOND))
_STEPS = (0x9E3779B9, 0xBB67AE85)
_WEYL = (np.uint64(_STEPS[0]), np.uint64(_STEPS[1]))
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
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
    """Return the Gumbel noise float32[N] of `Ops.sample`; arrays are [N], seeds uint64. Neighbours share words."""
    if len(token_ids) <= FEW:
        columns = (column.tolist() for column in (token_ids, positions, branches, seeds))
        return _gumbel(np.array([_word(*one) for one in zip(*columns, strict=True)], np.uint32))
    groups = token_ids // 4
    is_new = np.ones(len(token_ids), bool)
    is_new[1:] = groups[1:] != groups[:-1]
    for column in (positions, branches, seeds):
        is_new[1:] |= column[1:] != column[:-1]
    counters = np.zeros((np.count_nonzero(is_new), 4), np.uint32)
    counters[:, 0], counters[:, 1], counters[:, 2] = groups[is_new], positions[is_new], branches[is_new]
    words = philox_words(counters, seeds[is_new])[np.cumsum(is_new) - 1, token_ids % 4]
    return _gumbel(words)


def _gumbel(words: np.ndarray) -> np.ndarray:
    uniform = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise.astype(np.float32)


def _word(token_id: int, position: int, branch: int, seed: int) -> int:
    first, second, third, fourth = token_id // 4, position, branch, 0
    key, other_key = seed & _MASK, seed >> 32
    for _ in range(10):
        one, two = first * _FIRST, third * _SECOND
        first, second = two >> 32 ^ second ^ key, two & _MASK
        third, fourth = one >> 32 ^ fourth ^ other_key, one & _MASK
        key, other_key = key + _STEPS[0] & _MASK, other_key + _STEPS[1] & _MASK
    return (first, second, third, fourth)[token_id % 4]
