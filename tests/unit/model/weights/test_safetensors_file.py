"""Safetensors files that keep the format are read as they are, and each way to break it is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.weights.safetensors_file import read_safetensors
from tests.support.safetensors_bytes import entries_of, save, stored_values, write

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(5, NUMPY_DTYPES["bfloat16"]),
    "c": np.full((1, 2, 2), 3, np.float16),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_reads_what_the_library_writes(tmp_path: Path, metadata: dict[str, str] | None):
    save_file(TENSORS, tmp_path / "m.safetensors", metadata=metadata)
    stored = read_safetensors(tmp_path / "m.safetensors")
    assert stored.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert stored[name].dtype == array.dtype
        np.testing.assert_array_equal(stored_values(stored[name]), array)


def test_reads_any_part_of_a_tensor(tmp_path: Path):
    save(tmp_path / "m.safetensors", TENSORS)
    out = np.empty(3, np.float32)
    read_safetensors(tmp_path / "m.safetensors")["a"].read_into(2, out)
    np.testing.assert_array_equal(out, [2, 3, 4])


def test_a_file_that_is_cut_short_or_gone_after_it_was_opened(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    save(path, TENSORS)
    stored = read_safetensors(path)
    path.rename(tmp_path / "old.safetensors")
    save(path, {"a": np.zeros(3, np.float32)})  # another one in its place: what was opened is what is read
    np.testing.assert_array_equal(stored_values(stored["a"]), TENSORS["a"])
    os.truncate(tmp_path / "old.safetensors", (tmp_path / "old.safetensors").stat().st_size - 1)
    stored_values(stored["a"])
    with pytest.raises(ModelError, match=f"{path}: tensor 'c': ends beyond the file; the file was cut short"):
        stored_values(stored["c"])


def test_files_are_closed_once_nothing_reads_from_them(tmp_path: Path):
    save(tmp_path / "m.safetensors", TENSORS)
    stored = read_safetensors(tmp_path / "m.safetensors")
    descriptor = stored["a"].file.descriptor
    del stored
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_data_need_not_be_aligned_and_may_hide_behind_a_link(tmp_path: Path):
    header, data = entries_of(TENSORS)
    text = json.dumps(header).encode()
    write(tmp_path / "blob", text + b" " * (1 - len(text) % 2), data)
    (tmp_path / "m.safetensors").symlink_to(tmp_path / "blob")
    np.testing.assert_array_equal(stored_values(read_safetensors(tmp_path / "m.safetensors")["a"]), TENSORS["a"])


def change(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    (r"'a': dtype 'F8_E5M2' is not one of", change("a", dtype="F8_E5M2")),
    (r"'a': dtype .* is not one of", change("a", dtype=["F32"])),
    (r"'a': shape .* does not take the 24 bytes", change("a", shape=[2, 4])),
    (r"'a': shape is not a list", change("a", shape=[-2, -3])),
    (r"'a': shape is not a list", change("a", shape=[2.0, 3])),
    (r"'a': shape is not a list", change("a", shape=[True, 6])),
    (r"'a': shape is not a list", change("a", shape=[1] * 40)),
    (r"'a': shape is not a list", change("a", shape=[1 << 70])),
    (r"'a': shape .* does not take", change("a", shape=[1 << 33, 1 << 33, 1 << 33])),
    (r"'a': data_offsets is not a pair", change("a", data_offsets=[0])),
    (r"'a': data_offsets is not a pair", change("a", data_offsets=[-24, 0])),
    (r"'a': shape .* does not take the -24 bytes", change("a", data_offsets=[24, 0])),
    (r"'b': overlaps another tensor", change("b", data_offsets=[14, 24])),
    (r"'a': overlaps another tensor|'copy': overlaps", lambda header: header.update(copy=dict(header["a"]))),
    (r"'c': ends beyond the file", change("c", data_offsets=[1000, 1008])),
    (r"'b': leaves a gap before it|'c': leaves a gap", lambda header: header.pop("b")),
    (r"8 bytes belong to no tensor", lambda header: header.pop("c")),
    (r"'a': leaves a gap|'b': leaves a gap", lambda header: header.pop("a")),
    (r"'a': not described by", lambda header: header.update(a=3)),
    (r"'a': not described by", lambda header: header["a"].pop("shape")),
    (r"'a': not described by", change("a", more=1)),
]


@pytest.mark.parametrize(("problem", "break_it"), HOSTILE)
def test_hostile_headers(tmp_path: Path, problem: str, break_it: Callable[[dict[str, Any]], Any]):
    header, data = entries_of(TENSORS)
    break_it(header)
    path = tmp_path / "m.safetensors"
    write(path, header, data)
    with pytest.raises(ModelError, match=problem) as refusal:
        read_safetensors(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("header", "header_bytes", "problem"),
    [
        (b"", 0, "not valid JSON"),
        (b"{}", 1 << 63, "the header ends at byte"),
        (b"{}", 3, "the header ends at byte"),
        (b'{"a": NaN}', None, "NaN is not a number"),
        (b'{"a": 1, "a": 1}', None, "'a' occurs twice"),
        (b"[1]", None, "not a JSON object"),
        (b'{"\xff": 1}', None, "not valid JSON"),
        (b"[" * 50_000, None, "nested too deeply"),
    ],
)
def test_hostile_starts(tmp_path: Path, header: bytes, header_bytes: int | None, problem: str):
    write(tmp_path / "m.safetensors", header, b"", header_bytes)
    with pytest.raises(ModelError, match=problem):
        read_safetensors(tmp_path / "m.safetensors")


def test_no_file_at_all(tmp_path: Path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_safetensors(tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="not a regular file"):
        read_safetensors(tmp_path)
    (tmp_path / "short").write_bytes(b"1234567")
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_safetensors(tmp_path / "short")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 400), position=st.integers(0, 300), byte=st.integers(0, 255), length=st.none() | st.integers(0)
)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, cut: int, position: int, byte: int, length: int | None):
    path = tmp_path / "m.safetensors"
    save(path, TENSORS)
    damaged = bytearray(path.read_bytes())
    damaged[position % len(damaged)] = byte
    if length is not None:
        damaged[:8] = (length % (1 << 64)).to_bytes(8, "little")
    path.write_bytes(damaged[: max(len(damaged) - cut, 0)])
    with suppress(ModelError):
        for tensor in read_safetensors(path).values():
            assert stored_values(tensor).shape == tensor.shape
