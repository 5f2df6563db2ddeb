"""`quire check`: what would fit, said before anything is loaded."""

from __future__ import annotations

import argparse

from model.errors import ModelError
from model.kv_cache import block_bytes
from model.loader import weight_bytes
from model.ops.backend import open_ops
from service.cli.table import print_table
from service.config import Settings
from service.engine.build import read_model_config
from service.engine.memory import affordable_bytes
from service.errors import StartupError

GIB = 1 << 30
LENGTHS = (512, 2048, 8192, 32768, 131072)


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, metavar="N", help="also say how many sequences of N tokens fit at once")


def run_check(settings: Settings, flags: argparse.Namespace) -> int:
    """0: it fits, 1: it does not."""
    config = read_model_config(settings)
    try:
        ops = open_ops(settings.device, settings.dtype, config.dtype)
    except ModelError as error:
        raise StartupError(str(error)) from None
    weights = weight_bytes(config, ops.dtype)
    per_block = block_bytes(config, settings.block_size, ops.dtype)
    for_cache = affordable_bytes(settings, ops, reserved_bytes=weights)
    num_blocks = settings.num_gpu_blocks or max(0, for_cache // per_block)
    num_tokens = num_blocks * settings.block_size
    lengths = sorted({length for length in (*LENGTHS, flags.length or 0) if 0 < length <= config.max_position})
    print_table(
        [
            ("model", f"{config.family}, {config.num_parameters / 1e9:.3g} B parameters, {ops.dtype} on {ops.name}"),
            ("weights", f"{weights / GIB:.2f} GiB"),
            (
                "KV cache",
                f"{num_blocks * per_block / GIB:.2f} GiB: {num_blocks} blocks of {settings.block_size} tokens",
            ),
            ("a block", f"{per_block} bytes"),
            *((f"{length} tokens each", f"{num_tokens // length} sequences at once") for length in lengths),
        ]
    )
    if num_blocks < 1 or (settings.max_model_len or 1) > num_tokens:
        print("It does not fit.")
        return 1
    return 0
