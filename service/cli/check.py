"""`quire check`: what would fit, said before anything is loaded."""

from __future__ import annotations

import argparse

from model.errors import ModelError
from model.loader import weight_bytes
from model.ops.backend import open_ops
from service.cli.table import print_table
from service.config import Settings
from service.engine.build import read_model_config, wanted_model_len
from service.engine.memory import plan_memory
from service.errors import StartupError

GIB = 1 << 30
LENGTHS = (512, 2048, 8192, 32768, 131072)


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, metavar="N", help="also say how many sequences of N tokens fit at once")


def run_check(settings: Settings, flags: argparse.Namespace) -> int:
    """0: it fits, 1: it does not. What a step needs beside weights and cache is known only once it has run."""
    config = read_model_config(settings)
    wanted_len = wanted_model_len(settings, config)
    try:
        ops = open_ops(settings.device, settings.dtype, config.dtype)
    except ModelError as error:
        raise StartupError(str(error)) from None
    weights = weight_bytes(config, ops.dtype)
    rows = [
        ("model", f"{config.family}, {config.num_parameters / 1e9:.3g} B parameters, {ops.dtype} on {ops.device_name}"),
        ("weights", f"{weights / GIB:.2f} GiB"),
    ]
    try:
        memory = plan_memory(settings, config, ops, wanted_len, reserved_bytes=weights)
    except StartupError as reason:
        print_table([*rows, ("does not fit", str(reason))])
        return 1
    num_tokens = memory.num_blocks * memory.block_size
    lengths = sorted({length for length in (*LENGTHS, flags.length or 0) if 0 < length <= memory.max_model_len})
    print_table(
        [
            *rows,
            ("KV cache", f"{memory.num_blocks * memory.block_bytes / GIB:.2f} GiB, less a step's workspace on a GPU"),
            ("blocks", f"{memory.num_blocks} of {memory.block_size} tokens, {memory.block_bytes} bytes each"),
            *(
                (f"{length} tokens each", f"{min(num_tokens // length, settings.max_num_seqs)} sequences at once")
                for length in lengths
            ),
        ]
    )
    return 0
