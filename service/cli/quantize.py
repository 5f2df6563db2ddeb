"""`quire quantize`: write a model folder in fp8 or int4."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from model.errors import ModelError
from model.weights.writer import FORMAT_NAMES, write_quantised
from service.cli.models import located
from service.config.values import parse_model
from service.errors import StartupError

MIB = 1 << 20
DESCRIPTION = (
    "Write a compressed-tensors folder (vLLM, transformers): fp8 (e4m3, a scale for each row; inputs are rounded to "
    "e4m3 too) or int4-gN (a scale for N inputs). Weights are rounded to nearest, without calibration data: for int4, "
    "calibrated tools (llm-compressor, GPTQModel) lose less."
)


def add_quantize_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help="folder or org/name of a model with 16- or 32-bit weights"
    )
    parser.add_argument("--format", metavar="NAME", required=True, help=f"one of {', '.join(FORMAT_NAMES)}")
    parser.add_argument("--out", metavar="DIR", required=True, help="new or empty folder to write")


def run_quantize(flags: argparse.Namespace) -> int:
    """Write the folder. Return 0. Raises StartupError with one line."""
    out = Path(flags.out)
    directory = located(parse_model(flags.model)).folder
    shows_progress = sys.stderr.isatty()

    def on_bytes(num_bytes: int) -> None:
        if shows_progress:
            print(f"\r{num_bytes / MIB:.0f} MiB", end="", file=sys.stderr, flush=True)

    try:
        num_bytes = write_quantised(directory, out, flags.format, on_bytes)
    except ModelError as error:
        raise StartupError(str(error)) from None
    except OSError as error:
        raise StartupError(f"--out: {out} cannot be written: {error.strerror}") from None
    if shows_progress:
        print(file=sys.stderr)
    print(f"{out}: {flags.format}, {num_bytes / MIB:.1f} MiB of weights")
    return 0
