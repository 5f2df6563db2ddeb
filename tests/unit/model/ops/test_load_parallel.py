"""Every element of large arrays is asked for once, in pieces, and a fault ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from model.ops import load_parallel
from model.ops.cpu.ops import NumpyOps
from model.ops.load_parallel import Piece, load_in_threads


def test_arrays_are_filled_from_end_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_parallel, "PIECE_BYTES", 64)
    numbers = np.arange(1000, dtype=np.float32)
    whole = np.zeros((10, 30), np.float32)
    targets = [whole[:3], whole[3:], np.zeros(1, np.float16), np.zeros(0, np.float32)]

    def read(target: int, start: int, out: np.ndarray) -> None:
        assert out.nbytes <= 64
        out += numbers[target * 90 + start :][: out.size].astype(out.dtype) + 1

    NumpyOps().load_parallel(targets, read)
    np.testing.assert_array_equal(whole.reshape(-1), numbers[:300] + 1)
    assert targets[2] == numbers[180] + 1


def test_a_fault_is_raised_and_ends_the_work(monkeypatch: pytest.MonkeyPatch):
    """The other threads take a piece a millisecond until the fault has taken the rest away."""
    monkeypatch.setattr(load_parallel, "PIECE_BYTES", 4)
    taken = []

    def work(pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            taken.append(piece)
            if piece.start == 5:
                raise ValueError("the sixth")
            while piece.start > 5 and next(pieces, None) is not None:
                time.sleep(0.001)

    with pytest.raises(ValueError, match="the sixth"):
        load_in_threads([np.zeros(1 << 20, np.float32)], work)
    assert len(taken) <= 6 + load_parallel.MAX_THREADS


def test_nothing_to_fill():
    NumpyOps().load_parallel([], lambda *_: pytest.fail("nothing is to be read"))
