"""How fast a model's weights get to where it computes, beside how fast the same files are read and thrown away.

    python -m service.cli.bench.load_weights --model-config llama-3.1-8b --folder /dev/shm/weights [--out FILE]

Random weights are written to the folder first, unless they are there. What lies in memory (`/dev/shm`, or a file that
was just written) shows the way from the page cache; a disk's own speed shows after its cache was dropped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.loader import DummyWeights, load_model
from model.ops.backend import open_ops
from model.ops.filling import MAX_THREADS, PIECE_BYTES
from model.ops.interface import Ops
from model.weights import SINGLE_FILE, expected_shapes
from service.cli.bench.report import add_report_flags, check_report_flags, write_report
from service.cli.table import print_table, shown
from service.config import Settings
from service.engine.build import read_model_config

STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """The better of some rounds of each."""

    num_bytes: int
    num_threads: int  # that read, in both
    read_s: float  # the file, into memory that is used again and again
    load_s: float  # the file, to where the model computes: checked, every tensor in its place
    read_gb_per_s: float
    load_gb_per_s: float
    load_share: float  # of the reading's speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-config", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the weights are, or are to be written")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    config = read_model_config(replace(Settings(), model_config=flags.model_config, load_format="dummy"))
    ops = open_ops(flags.device, "auto", config.dtype)
    if not (flags.folder / SINGLE_FILE).exists():
        write_weights(flags.folder, config, ops.dtype)
    figures = measure(flags.folder, config, ops)
    print_table([(name.replace("_", " "), shown(value)) for name, value in asdict(figures).items()])
    bars = {"label": "GB/s", "x": ["read", "load"], "y": [figures.read_gb_per_s, figures.load_gb_per_s]}
    panel = {"kind": "bars", "title": "", "x": "GB/s", "y": "", "series": [bars]}
    record = {"bench": "load_weights", "device": ops.device_name, "model": flags.model_config, **asdict(figures)}
    write_report(flags, record, {"title": f"weights to {ops.device_name}", "panels": [panel]})


def measure(folder: Path, config: ModelConfig, ops: Ops) -> LoadFigures:
    """Raises ModelError where the folder's weights are not such a model's."""
    path = folder / SINGLE_FILE
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    reads_s = [_seconds(lambda: _read_all(path, num_threads)) for _ in range(ROUNDS)]
    loads_s = [_seconds(lambda: _load(folder, config, ops)) for _ in range(ROUNDS)]
    num_bytes, read_s, load_s = path.stat().st_size, min(reads_s), min(loads_s)
    return LoadFigures(
        num_bytes=num_bytes,
        num_threads=num_threads,
        read_s=read_s,
        load_s=load_s,
        read_gb_per_s=num_bytes / read_s / 1e9,
        load_gb_per_s=num_bytes / load_s / 1e9,
        load_share=read_s / load_s,
    )


def write_weights(folder: Path, config: ModelConfig, dtype: np.dtype) -> None:
    """Random ones, as one safetensors file."""
    header, end, shapes = {}, 0, expected_shapes(config)
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": STORED_AS[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    source = DummyWeights(config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for start, count in _pieces(math.prod(shape), PIECE_BYTES // dtype.itemsize):
                piece = np.empty(count, dtype)
                source.read_into(name, start, piece)
                file.write(piece.view(np.uint8).data)


def _load(folder: Path, config: ModelConfig, ops: Ops) -> None:
    load_model(folder, config, ops, 1)
    ops.synchronize()


def _read_all(path: Path, num_threads: int) -> None:
    def read(first: int) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            for place in range(first * PIECE_BYTES, path.stat().st_size, num_threads * PIECE_BYTES):
                file.seek(place)
                file.readinto(piece)

    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(read, first) for first in range(num_threads)]:
            done.result()


def _pieces(size: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(step, size - start)


def _seconds(work: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
