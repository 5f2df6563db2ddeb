"""Specification of sampling, in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.ops.cpu.philox import gumbel_noise
from model.ops.interface import Array, Bias, Penalties, Sampled, SamplingArrays, TokenCandidates, TokenMask

NOISE_SPAN = np.float32(19.5)
"""Exceeds any difference of two tokens' Gumbel noise: -log(-log(u)) for u in [2**-24, 1 - 2**-24]."""


def sample(logits: Array, params: SamplingArrays, out: Array | None) -> Sampled:
    """Implement `Ops.sample`."""
    adjusted = log_softmax(logits) if params.adjusts_logprobs else np.array(logits)
    if params.bias is not None:
        add_bias(adjusted, params.bias)
    if params.penalties is not None:
        penalise(adjusted, params.penalties)
    if params.mask is not None:
        forbid(adjusted, params.mask)
    best = adjusted.max(axis=1)
    is_nan = ~np.isfinite(best)
    scores = adjusted.copy() if params.adjusts_logprobs else None
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # A quotient that overflows leaves only the best token.
        drawn = np.flatnonzero(np.isfinite(best / params.temperature))
    if drawn.size:
        adjusted[drawn] = perturbed(adjusted[drawn], params, drawn)
    token_ids = np.where(is_nan, 0, np.argmax(adjusted, axis=1)).astype(np.int32)
    if out is not None:
        out[...] = token_ids
    if not params.with_logprobs:
        return Sampled(token_ids, is_nan, None, None, None)
    logprobs = log_softmax(logits) if scores is None else scores
    return Sampled(token_ids, is_nan, *_best_of(logprobs, token_ids, params.num_logprobs))


def sample_part(logits: Array, params: SamplingArrays, first_token: int) -> TokenCandidates:
    """Implement `PartOps.sample_part`."""
    adjusted = np.array(logits)
    if params.bias is not None:
        add_bias(adjusted, replace(params.bias, token_ids=params.bias.token_ids - first_token))
    if params.penalties is not None:
        penalise(adjusted, replace(params.penalties, token_ids=params.penalties.token_ids - first_token))
    best = adjusted.max(axis=1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scaled = best / params.temperature
    is_drawn = np.isfinite(scaled)
    drawn = np.flatnonzero(is_drawn)
    if drawn.size:
        adjusted[drawn] = perturbed(
            adjusted[drawn], params, drawn, np.arange(first_token, first_token + logits.shape[1])
        )
    token_ids = np.argmax(adjusted, axis=1)
    score = np.where(params.temperature == 0, np.float32(0), scaled)
    score[drawn] = adjusted[drawn, token_ids[drawn]]
    score[best == -np.inf] = -np.inf
    score[np.isnan(best) | (best == np.inf)] = np.nan
    tie = np.where(is_drawn, np.float32(0), best)
    return TokenCandidates((token_ids + first_token).astype(np.int32), score, tie)


def best_candidates(parts: TokenCandidates, out: Array | None) -> Sampled:
    """Implement `Collectives.best` for candidates [R, parts]."""
    rows, chosen = np.arange(len(parts.score)), np.zeros(len(parts.score), np.int64)
    for part in range(1, parts.score.shape[1]):
        score, best = parts.score[:, part], parts.score[rows, chosen]
        is_better = (score > best) | ((score == best) & (parts.tie[:, part] > parts.tie[rows, chosen]))
        chosen[is_better] = part
    is_nan = np.isnan(parts.score).any(axis=1) | (parts.tie[rows, chosen] == -np.inf)
    token_ids = np.where(is_nan, 0, parts.token_ids[rows, chosen]).astype(np.int32)
    if out is not None:
        out[...] = token_ids
    return Sampled(token_ids, is_nan, None, None, None)


def top_logprobs(logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
    """Implement `Ops.top_logprobs`."""
    return _best_of(log_softmax(logits), token_ids, num_best)


def _best_of(logprobs: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
    top_ids = np.empty((len(logprobs), min(num_best, logprobs.shape[1])), np.int32)
    for row, ids in zip(logprobs, top_ids, strict=True):
        ids[:] = highest(row, num_best)
    chosen = np.take_along_axis(logprobs, token_ids[:, None].astype(np.int64), axis=1)[:, 0]
    return chosen, top_ids, np.take_along_axis(logprobs, top_ids, axis=1)


def highest(row: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the `count` highest values of row [V], ties by id; NaN is lowest."""
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(row):
        lowest = np.partition(row, -count)[-count]
        candidates = np.flatnonzero(row >= lowest)
        if len(candidates) >= count:  # not with NaN, which sorts as the highest
            return candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    return np.argsort(-row, kind="stable")[:count]


def _row_of(indptr: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def add_bias(logits: np.ndarray, bias: Bias) -> None:
    """Change logits float32[R, V] in place."""
    known = (bias.token_ids >= 0) & (bias.token_ids < logits.shape[1])
    rows = _row_of(bias.indptr)[known]
    np.add.at(logits, (rows, bias.token_ids[known]), bias.values[known])


def penalise(logits: np.ndarray, seen: Penalties) -> None:
    """Change logits float32[R, V] in place, repetition first."""
    known = (seen.token_ids >= 0) & (seen.token_ids < logits.shape[1])
    rows, ids, counts = _row_of(seen.indptr)[known], seen.token_ids[known], seen.output_counts[known]
    values, factor = logits[rows, ids], seen.repetition[rows]
    values = np.where(values > 0, values / factor, values * factor)
    values -= seen.frequency[rows] * counts + seen.presence[rows] * (counts > 0)
    logits[rows, ids] = values


def forbid(logits: np.ndarray, mask: TokenMask) -> None:
    """Set masked logits float32[R, V] to -inf in place."""
    masked = np.flatnonzero((mask.rows >= 0) & (mask.rows < len(mask.words)))
    words = mask.words[mask.rows[masked]].astype("<u4")
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    logits[masked] = np.where(bits, logits[masked], -np.inf)


def perturbed(
    logits: np.ndarray, params: SamplingArrays, rows: np.ndarray, vocabulary: np.ndarray | None = None
) -> np.ndarray:
    """logits [N, V] of `rows` of `params` -> logits / temperature + noise, -inf if left out. Tokens that cannot be the
    best get no noise. `vocabulary` int[V]: token ids, unless 0..V-1."""
    with np.errstate(over="ignore"):
        scaled: np.ndarray = logits / params.temperature[rows, None]
    cut = (params.top_k[rows] < logits.shape[1]) | (params.top_p[rows] < 1) | (params.min_p[rows] > 0)
    if cut.any():
        thresholds = _thresholds(scaled[cut], params.top_k[rows[cut]], params.top_p[rows[cut]], params.min_p[rows[cut]])
        scaled[cut] = np.where(scaled[cut] >= thresholds[:, None], scaled[cut], -np.inf)
    best = scaled.max(axis=1, keepdims=True)
    kept, columns = np.nonzero(scaled > best - NOISE_SPAN - 4 * np.spacing(np.abs(best)))
    token_ids = columns if vocabulary is None else vocabulary[columns]
    at = rows[kept]
    scaled[kept, columns] += gumbel_noise(token_ids, params.seed[at], params.position[at], params.branch[at])
    return scaled


def _thresholds(scaled: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> np.ndarray:
    """Return the lowest values float32[N] that top-k, top-p and min-p keep of scaled [N, V]."""
    descending = -np.sort(-scaled, axis=1)
    kth = np.take_along_axis(descending, np.clip(top_k, 1, scaled.shape[1])[:, None] - 1, axis=1)
    weights = np.exp((descending - descending[:, :1]).astype(np.float64))
    weights[descending < kth] = 0
    mass = np.cumsum(weights, axis=1)
    nucleus = np.where(top_p < 1, np.argmax(mass >= top_p[:, None] * mass[:, -1:], axis=1) + 1, scaled.shape[1])
    likely = np.count_nonzero(weights >= min_p[:, None], axis=1)
    last = np.minimum(nucleus, likely)[:, None] - 1
    thresholds: np.ndarray = np.maximum(kth, np.take_along_axis(descending, last, axis=1))
    return thresholds[:, 0]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return float32[R, V]; NaN in rows with a NaN or no finite logit."""
    with np.errstate(invalid="ignore"):
        shifted: np.ndarray = logits - logits.max(axis=1, keepdims=True)
        logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return logprobs
