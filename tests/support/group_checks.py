"""Sums of a group of GPUs against NumPy's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.ops.collectives import NumpyCollectives
from model.ops.group.arrays import GroupArray
from model.ops.group.turns import in_turn


def on_ranks(ops, hosts: Sequence[np.ndarray]) -> GroupArray:
    """One array a rank, uploaded."""
    return GroupArray(tuple(rank.upload(hosts[number]) for number, rank in in_turn(ops.ranks)))


def downloaded(ops, array: GroupArray) -> np.ndarray:
    """The array, which every rank has to the bit."""
    return ops.download(array)


def total(hosts: Sequence[np.ndarray]) -> np.ndarray:
    """In rank order in float32, rounded once."""
    return NumpyCollectives().sum(hosts)[0]
