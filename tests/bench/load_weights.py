"""Speed of loading weights to the device, and of only reading the same files.

    python -m tests.bench.load_weights --model-config llama-3.1-8b --folder /dev/shm/weights [--cold] [--out FILE]

Random weights are written to the folder first, unless they exist. A folder in memory shows the way from the page cache;
`--cold` evicts the file before each round, and shows the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.ops.backend import open_ops
from model.ops.interface import Ops
from model.ops.load_parallel import MAX_THREADS, PIECE_BYTES
from model.stored_names import SINGLE_FILE
from model.weights.checkpoint import expected_shapes
from model.weights.dummy import DummyWeights
from model.weights.loader import load_model
from service.bench.report import add_report_flags, check_report_flags, run_script, write_report
from service.cli.table import print_table, shown
from service.config.settings import Settings
from service.engine.build import read_model_config
from service.errors import StartupError

STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """The best of some rounds each."""

    num_bytes: int
    num_threads: int  # reading threads
    is_cold: bool  # from disk
    read_s: float  # the file, into reused memory
    uncached_read_s: float | None  # with O_DIRECT, if the disk supports it
    hand_over_s: float  # unread bytes to the device: bus and pinned memory
    load_s: float  # the file to the device, checked, every tensor placed
    read_gb_per_s: float  # of the faster reading
    hand_over_gb_per_s: float
    load_gb_per_s: float
    load_share: float  # of the reading speed
    possible_share: float  # of the slower of reading and copying, a bound for any loading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-config", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the weights are, or are to be written")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cold", action="store_true", help="from the disk, not from the page cache")
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    config = read_model_config(replace(Settings(), model_config=flags.model_config, load_format="dummy"))
    ops = open_ops(flags.device, "auto", config.dtype)
    if not (flags.folder / SINGLE_FILE).exists():
        write_weights(flags.folder, config, ops.dtype)
    figures = measure(flags.folder, config, ops, is_cold=flags.cold)
    print_table([(name.replace("_", " "), shown(value)) for name, value in asdict(figures).items()])
    bars = {"label": "GB/s", "x": ["read", "hand over", "load"]}
    bars["y"] = [figures.read_gb_per_s, figures.hand_over_gb_per_s, figures.load_gb_per_s]
    panel = {"kind": "bars", "title": "", "x": "GB/s", "y": "", "series": [bars]}
    record = {"bench": "load_weights", "device": ops.device_name, "model": flags.model_config, **asdict(figures)}
    write_report(flags, record, {"title": f"weights to {ops.device_name}", "panels": [panel]})


def measure(folder: Path, config: ModelConfig, ops: Ops, *, is_cold: bool = False) -> LoadFigures:
    """Raises ModelError if the folder's weights do not match the model."""
    path = folder / SINGLE_FILE
    num_bytes = path.stat().st_size
    before = partial(_drop, path) if is_cold else lambda: None
    read_s = _quickest(lambda: _read_all(path), before)
    uncached_s = _uncached_s(path) if is_cold else None
    load_s = _quickest(lambda: _load(folder, config, ops), before)
    target = ops.empty((num_bytes,), np.dtype(np.uint8))
    hand_over_s = _quickest(lambda: ops.load_parallel([target], lambda *_: None), lambda: None)
    best_s = read_s if uncached_s is None else min(read_s, uncached_s)
    return LoadFigures(
        num_bytes=num_bytes,
        num_threads=_num_threads(),
        is_cold=is_cold,
        read_s=read_s,
        uncached_read_s=uncached_s,
        hand_over_s=hand_over_s,
        load_s=load_s,
        read_gb_per_s=num_bytes / best_s / 1e9,
        hand_over_gb_per_s=num_bytes / hand_over_s / 1e9,
        load_gb_per_s=num_bytes / load_s / 1e9,
        load_share=best_s / load_s,
        possible_share=max(best_s, hand_over_s) / load_s,
    )


def write_weights(folder: Path, config: ModelConfig, dtype: np.dtype) -> None:
    """Write random weights as one safetensors file, atomically. Raises StartupError if the disk is full."""
    header, end, shapes = {}, 0, expected_shapes(config)
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": STORED_AS[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    source = DummyWeights(config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 8 + len(text) + end:
        raise StartupError(f"--folder: the weights take {end / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} left")
    unfinished = folder / f"{SINGLE_FILE}.unfinished"
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def write(name: str, start: int, count: int) -> None:
            piece = np.empty(count, dtype)
            source.read_into(name, start, piece)
            place = 8 + len(text) + header[name]["data_offsets"][0] + start * dtype.itemsize
            if os.pwrite(file.fileno(), piece.view(np.uint8).data, place) != piece.nbytes:
                raise OSError(f"{folder}: no room for the weights")

        pieces = [
            (name, *piece) for name, shape in shapes.items() for piece in _pieces(math.prod(shape), dtype.itemsize)
        ]
        _in_threads(lambda piece: write(*piece), pieces)
    unfinished.replace(folder / SINGLE_FILE)


def _load(folder: Path, config: ModelConfig, ops: Ops) -> None:
    load_model(folder, config, ops, 1)
    ops.synchronize()


def _uncached_s(path: Path) -> float | None:
    try:
        return _quickest(lambda: _read_all(path, os.O_DIRECT), partial(_drop, path))
    except OSError as error:
        print(f"not read past the page cache: {error}")
        return None


def _read_all(path: Path, how: int = 0) -> None:
    num_bytes, num_threads = path.stat().st_size, _num_threads()

    def read(first: int) -> None:
        with mmap.mmap(-1, PIECE_BYTES) as piece:  # page-aligned for O_DIRECT
            descriptor = os.open(path, os.O_RDONLY | how)
            try:
                for place in range(first * PIECE_BYTES, num_bytes, num_threads * PIECE_BYTES):
                    if os.preadv(descriptor, [piece], place) < min(PIECE_BYTES, num_bytes - place):
                        raise OSError(f"{path}: not read in one go")
            finally:
                os.close(descriptor)

    _in_threads(read, range(num_threads))


def _drop(path: Path) -> None:
    """Read once, so that the page cache has it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _in_threads(work: Callable[[Any], None], pieces: Iterable[Any]) -> None:
    with ThreadPoolExecutor(_num_threads()) as threads:
        for _ in threads.map(work, pieces):
            pass


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _pieces(size: int, itemsize: int) -> Iterator[tuple[int, int]]:
    step = PIECE_BYTES // itemsize
    for start in range(0, size, step):
        yield start, min(step, size - start)


def _quickest(work: Callable[[], None], before: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        before()
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)


if __name__ == "__main__":
    run_script(main)
