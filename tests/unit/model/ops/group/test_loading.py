"""A group's arrays are filled from wholes that are read once."""

from __future__ import annotations

from threading import Lock

import numpy as np
import pytest

from model.ops.group import loading
from model.ops.group.arrays import Section, Split, divided
from tests.support.group import group_of

SPLITS = (
    None,
    Split(0, (Section(12), Section(6, 2))),
    Split(1, (Section(4),)),
    Split(1, (Section(5),)),
    Split(2, (Section(2, 2),)),
)
SHAPES = ((18, 4), (18, 4), (18, 4), (7, 5), (3, 2, 2))


@pytest.mark.parametrize("piece_bytes", [1, 24, 100, 1 << 20])
def test_every_rank_gets_its_part_of_what_is_read_once(monkeypatch, piece_bytes: int):
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    ops, lock = group_of(4), Lock()
    wholes = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in SHAPES]
    num_read = [np.zeros(whole.size, int) for whole in wholes]
    targets = [
        divided(ops.empty(shape if split is None else split.part_shape(shape, 4), np.dtype(np.float32)), split)
        for shape, split in zip(SHAPES, SPLITS, strict=True)
    ]

    def read(target: int, start: int, out: np.ndarray) -> None:
        out[...] = wholes[target].reshape(-1)[start : start + out.size]
        with lock:
            num_read[target][start : start + out.size] += 1

    ops.load_parallel(targets, read)
    assert all((counts == 1).all() for counts in num_read)
    for whole, target in zip(wholes, targets, strict=True):
        np.testing.assert_array_equal(ops.download(target), whole)
    np.testing.assert_array_equal(targets[1].parts[3], wholes[1][[9, 10, 11, 15, 16, 17]])


@pytest.mark.parametrize("axis", [0, 1])
def test_padding_gets_zeros(axis: int):
    """Memory of a GPU holds anything at first, and weights are checked for NaN."""
    ops, shape, split = group_of(4), (5, 5), Split(axis, (Section(5),))
    target = divided(ops.empty(split.part_shape(shape, 4), np.dtype(np.float32)), split)
    for part in target.parts:
        part.fill(np.nan)
    ops.load_parallel([target], lambda _, start, out: out.fill(1))
    whole = np.concatenate(target.parts, axis=axis)
    assert whole.sum() == 25
    np.testing.assert_array_equal(ops.download(target), np.ones(shape))


def test_an_error_of_the_reader_is_raised():
    def read(target: int, start: int, out: np.ndarray) -> None:
        raise ValueError("cut short")

    ops = group_of(2)
    with pytest.raises(ValueError, match="cut short"):
        ops.load_parallel([ops.empty((2,), np.dtype(np.float32))], read)
