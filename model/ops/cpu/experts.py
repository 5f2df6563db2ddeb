"""Specification of routing and of sums over experts."""

from __future__ import annotations

import numpy as np

from model.ops.interface import Array, ExpertGroups


def route_experts(
    logits: Array, num_used: int, renormalise: bool, slots: Array | None, num_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """logits float32[T, E] -> ids int32[T, k], weights float32[T, k]; -1 and 0 where the slot is outside the cache."""
    with np.errstate(invalid="ignore"):
        exps = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = exps / exps.sum(axis=1, keepdims=True)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_used]
        weights = np.take_along_axis(probabilities, ids, axis=1)
        if renormalise:
            weights = weights / weights.sum(axis=1, keepdims=True)
    if slots is not None:
        is_padding = (slots < 0) | (slots >= num_slots)
        ids[is_padding], weights[is_padding] = -1, 0
    return ids.astype(np.int32), weights


def group_by_expert(ids: Array, num_experts: int) -> ExpertGroups:
    """ids int32[T, k] -> its pairs, sorted by expert, then by row; pairs with -1 last."""
    flat = np.where(ids < 0, num_experts, ids).reshape(-1)
    order = np.argsort(flat, kind="stable")
    places = np.empty(flat.size, np.int32)
    places[order] = np.arange(flat.size, dtype=np.int32)
    places[flat == num_experts] = -1
    offsets = np.zeros(num_experts + 1, np.int32)
    np.cumsum(np.bincount(flat, minlength=num_experts)[:num_experts], out=offsets[1:])
    return ExpertGroups((order // ids.shape[1]).astype(np.int32), places.reshape(ids.shape), offsets)


def combine_experts(x: Array, groups: ExpertGroups, weights: Array) -> np.ndarray:
    """x [P, H], weights float32[T, k] -> float32[T, H]."""
    total = np.zeros((len(weights), x.shape[1]), np.float32)
    for column in range(weights.shape[1]):
        places = groups.places[:, column]
        rows = x[places].astype(np.float32, copy=False)
        is_padding = places[:, None] < 0
        total += weights[:, column, None] * (np.where(is_padding, 0, rows) if is_padding.any() else rows)
    return total
