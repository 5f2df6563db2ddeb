"""Sums of a group of GPUs against NumPy's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.ops.collectives import NumpyCollectives
from model.ops.group.arrays import GroupArray
from model.ops.group.turns import in_turn


def on_ranks(ops, hosts: Sequence[np.ndarray]) -> GroupArray:
    """Upload one array per rank."""
    return GroupArray(tuple(rank.upload(hosts[number]) for number, rank in in_turn(ops.ranks)))


def downloaded(ops, array: GroupArray) -> np.ndarray:
    """Return the array; the ranks' must have equal bits."""
    return ops.download(array)


def total(hosts: Sequence[np.ndarray]) -> np.ndarray:
    """Sum in rank order in float32, rounded once."""
    return NumpyCollectives().sum(hosts)[0]
