"""Loading to a GPU, with memory of this process in its place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from model.ops import load_parallel
from tests.support.fake_ranks import Addressed
from tests.support.fake_streams import Pinned, Stream

transfers = pytest.importorskip("model.ops.gpu.transfers", reason="needs the packages of the cuda extra")

PIECE_BYTES = 64


@pytest.fixture
def gpu(monkeypatch):
    """Return `Transfers`, and what its memory did."""
    streams: dict[int, Stream] = {}
    log: list[str] = []

    def open_stream(**_) -> Stream:
        stream = Stream()
        streams[stream.ptr] = stream
        return stream

    def pin(num_bytes: int) -> Pinned:
        log.append("pin")
        return Pinned(num_bytes)

    def copy(target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        streams[stream].copies.append((target, source, num_bytes))

    pool = SimpleNamespace(free_all_blocks=lambda: log.append("free"))
    device = SimpleNamespace(use=lambda: None)
    cuda = SimpleNamespace(Stream=open_stream, Device=lambda: device, alloc_pinned_memory=pin)
    monkeypatch.setattr(transfers, "cupy", SimpleNamespace(cuda=cuda, get_default_pinned_memory_pool=lambda: pool))
    monkeypatch.setattr(transfers, "runtime", SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice=1))
    for module in (transfers, load_parallel):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
    moved = transfers.Transfers.__new__(transfers.Transfers)
    moved._stream = Stream()
    return moved, log


def test_every_piece_arrives_where_it_belongs(gpu):
    moved, log = gpu
    wholes = [np.arange(size, dtype=dtype) for size, dtype in ((100, np.float32), (1, np.uint8), (333, np.uint8))]
    targets = [np.zeros_like(whole).view(Addressed) for whole in wholes]

    def read(target: int, start: int, out: np.ndarray) -> None:
        out[...] = wholes[target][start : start + out.size]

    moved.load_parallel(targets, read)
    for whole, target in zip(wholes, targets, strict=True):
        np.testing.assert_array_equal(target, whole)
    assert 1 <= log.count("pin") <= 2 * load_parallel.MAX_THREADS
    assert "free" not in log
    moved.release_staging()
    assert log[-1] == "free"


def test_an_exception_of_a_read_is_raised_once_all_copies_are_done(gpu):
    moved, _ = gpu
    target = np.zeros(1000, np.uint8).view(Addressed)

    def read(_: int, start: int, out: np.ndarray) -> None:
        if start == 3 * PIECE_BYTES:
            raise OSError("unreadable")
        out[...] = 1

    with pytest.raises(OSError, match="unreadable"):
        moved.load_parallel([target], read)
    assert target[: 3 * PIECE_BYTES].all()
