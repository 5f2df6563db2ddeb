"""Copies of pieces to GPUs, with memory of this process in the GPUs' place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from model.ops.group.arrays import Section, Split, SplitArray
from model.ops.group.loading import load_group
from tests.support.fake_ranks import Addressed, FakeRank
from tests.support.fake_streams import Pinned, Stream

loading = pytest.importorskip("model.ops.gpu.group.loading", reason="needs the packages of the cuda extra")


class Event:
    def __init__(self, **_):
        self.wait = lambda: None

    def record(self, stream: Stream) -> None:
        last = stream.copies[-1] if stream.copies else None
        self.wait = lambda: stream.synchronize(stream.copies.index(last) + 1) if last in stream.copies else None

    def synchronize(self) -> None:
        self.wait()


@pytest.fixture
def fake_cuda(monkeypatch):
    streams: dict[int, Stream] = {}

    def open_stream(**_) -> Stream:
        stream = Stream()
        streams[stream.ptr] = stream
        return stream

    def copy(target, pitch, source, source_pitch, width, height, kind, stream) -> None:
        for row in range(height):
            streams[stream].copies.append((target + row * pitch, source + row * source_pitch, width))

    cuda = SimpleNamespace(Stream=open_stream, Event=Event, alloc_pinned_memory=Pinned)
    monkeypatch.setattr(loading, "cupy", SimpleNamespace(cuda=cuda))
    runtime = SimpleNamespace(
        memcpyHostToDevice=1,
        memcpy2DAsync=copy,
        memcpyAsync=lambda target, source, size, kind, stream: copy(target, 0, source, 0, size, 1, kind, stream),
    )
    monkeypatch.setattr(loading, "runtime", runtime)


@pytest.mark.parametrize("piece_bytes", [24, 80, 1 << 20])
def test_every_rank_gets_its_part(fake_cuda, monkeypatch, piece_bytes: int):
    for module in ("model.ops.group.loading", "model.ops.gpu.group.loading"):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", piece_bytes)
    ranks = [FakeRank(number, []) for number in range(2)]
    wholes = [np.arange(240, dtype=np.float32).reshape(shape) for shape in ((24, 10), (20, 12), (2, 12, 10))]
    splits = [Split(0, (Section(16), Section(8))), Split(1, (Section(12),)), Split(1, (Section(4), Section(8)))]
    targets = [
        SplitArray(tuple(np.zeros(split.part_shape(w.shape, 2), w.dtype).view(Addressed) for _ in ranks), split)
        for w, split in zip(wholes, splits, strict=True)
    ]

    def read(target: int, start: int, out: np.ndarray) -> None:
        out[...] = wholes[target].reshape(-1)[start : start + out.size]

    load_group(ranks, targets, read, lambda: loading.CudaPieceWriter(ranks))
    for whole, split, target in zip(wholes, splits, targets, strict=True):
        for rank in range(2):
            np.testing.assert_array_equal(target.parts[rank], split.part_of(whole, rank, 2))
