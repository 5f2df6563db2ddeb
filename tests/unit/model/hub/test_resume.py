"""Parts that a killed process left, with the real client and a hub on loopback."""

from __future__ import annotations

import hashlib
from collections import namedtuple

import pytest
from filelock import FileLock

from tests.unit.model.hub.test_download import CHUNK, WEIGHTS, hub, locate, refusal

__all__ = ["hub"]  # the fixture
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
HALF = WEIGHTS[: len(WEIGHTS) // 2]


@pytest.fixture
def blobs(tmp_path):
    folder = tmp_path / "models--org--tiny" / "blobs"
    folder.mkdir(parents=True)
    return folder


def leave(blobs, data, blob=SHA256, process="0a1b2c3d"):
    (blobs / f"{blob}.{process}.incomplete").write_bytes(data)


def test_the_longest_part_is_continued_and_the_others_are_removed(hub, blobs, tmp_path):
    leave(blobs, HALF)
    leave(blobs, HALF[:CHUNK], process="11111111")
    leave(blobs, b"of another revision", blob="f" * 64)
    (blobs / f"{'e' * 64}.incomplete").write_bytes(b"of an older client")
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges() == [f"bytes={len(HALF)}-"]
    assert not list(blobs.glob("*.incomplete"))


def test_a_part_needs_no_room_again(hub, blobs, tmp_path, monkeypatch):
    leave(blobs, HALF)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("model.hub.download.disk_usage", lambda path: usage(0, 0, len(HALF) - 1))
    assert " has 0.00 GiB free" in refusal(tmp_path)
    monkeypatch.setattr("model.hub.download.disk_usage", lambda path: usage(0, 0, len(HALF)))
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_complete_part_is_only_checked_and_a_wrong_one_fetched_again(hub, blobs, tmp_path):
    leave(blobs, WEIGHTS)
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges() == []
    (blobs / SHA256).unlink()
    leave(blobs, b"x" + HALF[1:])
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges() == [f"bytes={len(HALF)}-", ""]


def test_a_part_outlives_a_failure_with_what_came_since(hub, blobs, tmp_path):
    leave(blobs, HALF)
    hub.cuts = [CHUNK] + [0] * 20
    assert "start again to continue" in refusal(tmp_path)
    assert next(blobs.glob("*.incomplete")).stat().st_size == len(HALF) + CHUNK
    hub.cuts = []
    assert (locate(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges()[-1] == f"bytes={len(HALF) + CHUNK}-"


def test_a_part_of_a_living_process_is_left_alone(hub, blobs, tmp_path):
    leave(blobs, HALF, blob="d" * 64)
    leave(blobs, HALF)
    lock = tmp_path / ".locks" / "models--org--tiny" / f"{'d' * 64}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        locate(tmp_path)
    assert [path.name[:1] for path in blobs.glob("*.incomplete")] == ["d"]
