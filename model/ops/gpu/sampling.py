"""Launches the sampling kernels."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, Sampled, SamplingArrays

_THREADS = 1024  # LOGITS_THREADS of logits.cuh
_MASK_THREADS = 256
_MASKED_PER_BLOCK = 4096  # GROUPS_PER_THREAD groups of four of apply_token_mask.cu
_MAX_VOCAB = 1 << 19
"""Most tokens in a bin of threshold.cuh's histograms."""

_SHARES, _MIN_SHARED_VOCAB = 8, 1 << 15
"""Blocks per row if few rows would leave most SMs idle, and fewest tokens of such a row. H200, a greedy row of 128,256
tokens: 4.7 us instead of 13.4."""

_FP32 = 0
"""QUIRE_DTYPE of logits, which are float32."""


def sample(device: KernelLauncher, logits: Array, params: SamplingArrays, out: Array | None) -> Sampled:
    """Implement `Ops.sample`."""
    rows, vocab = logits.shape
    if not 0 < vocab <= _MAX_VOCAB:
        raise ValueError(f"sample: a vocabulary of {vocab} is not supported (1 to {_MAX_VOCAB})")
    token_ids = device.temporary((rows,), np.int32) if out is None else out
    is_nan = device.temporary((rows,), np.bool_)
    columns = (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.position,
        params.branch,
    )
    if params.adjusts_logprobs:
        logits = _log_softmax(device, logits)
    adjusted = _masked(device, logits, _adjusted(device, logits, params), params)
    args = (adjusted, *columns, token_ids, is_nan, np.int32(vocab))
    if device.arch == "90a" and rows * _SHARES <= device.num_sms and vocab >= _MIN_SHARED_VOCAB:
        grid, shares = (_SHARES, rows), _SHARES
        device.launch("sample_tokens", grid, args, threads=_THREADS, cluster=shares, QUIRE_DTYPE=_FP32, SHARES=shares)
    else:
        device.launch("sample_tokens", (rows,), args, threads=_THREADS, QUIRE_DTYPE=_FP32)
    if not params.with_logprobs:
        return Sampled(token_ids, is_nan, None, None, None)

    scores = adjusted if params.adjusts_logprobs else logits
    logprobs = top_logprobs(device, scores, token_ids, params.num_logprobs, are_logprobs=params.adjusts_logprobs)
    return Sampled(token_ids, is_nan, *logprobs)


def top_logprobs(
    device: KernelLauncher, logits: Array, token_ids: Array, num_best: int, *, are_logprobs: bool = False
) -> tuple[Array, Array, Array]:
    """Implement `Ops.top_logprobs`; `are_logprobs`: `logits` are log-probabilities."""
    rows, vocab = logits.shape
    num_best = min(num_best, vocab)
    chosen = device.temporary((rows,), np.float32)
    top_ids, top = device.temporary((rows, num_best), np.int32), device.temporary((rows, num_best), np.float32)
    args = (logits, token_ids, chosen, top_ids, top, np.int32(vocab), np.int32(num_best), np.int32(are_logprobs))
    device.launch("top_logprobs", (rows,), args, threads=_THREADS, QUIRE_DTYPE=_FP32)
    return chosen, top_ids, top


def _log_softmax(device: KernelLauncher, logits: Array) -> Array:
    logprobs = device.temporary(logits.shape, np.float32)
    args = (logits, logprobs, np.int32(logits.shape[1]))
    device.launch("log_softmax", (len(logits),), args, threads=_THREADS, QUIRE_DTYPE=_FP32)
    return logprobs


def _adjusted(device: KernelLauncher, logits: Array, params: SamplingArrays) -> Array:
    """Return logits with bias and penalties, or the same array without either."""
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
    )
    device.launch("apply_penalties", (len(logits),), args, threads=_THREADS, QUIRE_DTYPE=_FP32)
    return adjusted


def _masked(device: KernelLauncher, logits: Array, adjusted: Array, params: SamplingArrays) -> Array:
    mask = params.mask
    if mask is None:
        return adjusted
    rows, vocab = logits.shape
    masked = device.temporary(logits.shape, np.float32) if adjusted is logits else adjusted
    num_masks, num_words = mask.words.shape
    sizes = map(np.int32, (num_masks, num_words, vocab))
    grid = (rows, math.ceil(vocab / _MASKED_PER_BLOCK))
    args = (adjusted, masked, mask.rows, mask.words, *sizes)
    device.launch("apply_token_mask", grid, args, threads=_MASK_THREADS, QUIRE_DTYPE=_FP32)
    return masked
