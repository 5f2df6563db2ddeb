"""Launches the kernels that sample from a part of the vocabulary."""

from __future__ import annotations

import numpy as np

from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, SamplingArrays, TokenCandidates

_THREADS = 1024  # LOGITS_THREADS of logits.cuh
_FP32 = 0
"""QUIRE_DTYPE of logits, which are float32."""


def sample_part(device: KernelLauncher, logits: Array, params: SamplingArrays, first_token: int) -> TokenCandidates:
    """Implement `PartOps.sample_part`; logits are contiguous."""
    rows, width = logits.shape
    token_ids = device.temporary((rows,), np.int32)
    score, tie = (device.temporary((rows,), np.float32) for _ in range(2))
    columns = params.temperature, params.seed, params.position, params.branch
    sizes = np.int32(width), np.int32(first_token)
    args = (_adjusted(device, logits, params, first_token), *columns, token_ids, score, tie, *sizes)
    device.launch("sample_part", (rows,), args, threads=_THREADS, QUIRE_DTYPE=_FP32)
    return TokenCandidates(token_ids, score, tie)


def _adjusted(device: KernelLauncher, logits: Array, params: SamplingArrays, first_token: int) -> Array:
    """Return logits with bias and penalties of the part's tokens, or the same array without either."""
    bias, seen = params.bias, params.penalties
    if bias is None and seen is None:
        return logits
    adjusted = device.temporary(logits.shape, np.float32)
    args = (
        logits,
        adjusted,
        *((None, None, None) if bias is None else (bias.indptr, bias.token_ids, bias.values)),
        *((None, None, None) if seen is None else (seen.indptr, seen.token_ids, seen.output_counts)),
        *((None, None, None) if seen is None else (seen.repetition, seen.presence, seen.frequency)),
        np.int32(logits.shape[1]),
        np.int32(first_token),
    )
    device.launch("apply_penalties", (len(logits),), args, threads=_THREADS, QUIRE_DTYPE=_FP32, IS_PART=1)
    return adjusted
