"""Measure every matrix product of a model's steps and record the quickest algorithm: makes model/ops/gpu/measured/.

    python -m tests.bench.measure_products --model-config llama-3.1-8b --max-num-seqs 1024 [--ranks 2] --out FOLDER

Covers captured sizes up to that number of sequences, and whole chunks up to the largest step, in about half a minute. A
start measures only a few of these itself. With `--ranks` the matrices are those of a rank; one GPU is enough.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.cuda_graphs import StepGraphs
from model.ops.backend import open_ops
from model.presets import PRESETS
from model.weights.loader import load_model
from service.engine.build import DEFAULT_BATCHED_TOKENS, DEFAULT_PREFILL_CHUNK


def main() -> None:
    """Needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-config", required=True)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--chunk-step", type=int, default=DEFAULT_PREFILL_CHUNK["cuda"], help="tokens between chunks")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the file")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUIRE_CACHE_DIR"] = folder  # empty: only the shipped measurements are known
        _measure(part_of(PRESETS[flags.model_config], flags.ranks), flags.max_num_seqs, flags.chunk_step)
        flags.out.mkdir(parents=True, exist_ok=True)
        for found in Path(folder).glob("*/linear-*.json"):
            shutil.copyfile(found, flags.out / found.name)
            print(flags.out / found.name)


def part_of(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return a model with the matrices of a rank."""
    own = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    own |= {"intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size}
    return replace(config, **{name: -(-size // num_ranks) for name, size in own.items()})


def _measure(config: ModelConfig, max_num_seqs: int, chunk_step: int) -> None:
    ops = open_ops("cuda", "auto", config.dtype)
    model = load_model(None, config, ops, 1024, load_format="dummy")
    sampled = ops.empty((max_num_seqs,), np.dtype(np.int32))
    in_layers, in_head = StepGraphs(model, sampled, max_num_seqs, 1).num_rows()
    most = DEFAULT_BATCHED_TOKENS["cuda"]
    model.tune(sorted({*in_layers, *range(chunk_step, most + 1, chunk_step)}), in_head)


if __name__ == "__main__":
    main()
