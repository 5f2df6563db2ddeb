"""Bench output: table, JSON record, drawing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import ModelError
from service.errors import StartupError
from service.import_root import IMPORT_ROOT, python_path

PACKAGE = __name__.rpartition(".")[0]

Figure = dict[str, Any]
"""Input of `plot.py`: {"title", "panels": [{"kind", "title", "x", "y", "series": [{"label", "x", "y"}]}]}; kind is
"line", "steps", "bars" or "stack"; a panel may have "y_max"."""


@dataclass(frozen=True)
class Spread:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the percentiles; None without values."""
        return cls(*map(float, np.percentile(values, (50, 90, 99)))) if len(values) else None

    def __str__(self) -> str:
        return " / ".join(f"{value:.4g}" for value in asdict(self).values())


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the figures (default: none)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".png, .svg or .pdf drawing (default: none)")


def check_report_flags(flags: argparse.Namespace) -> None:
    """Raise StartupError for a file that cannot be written, before measuring."""
    for flag, path in (("--out", flags.out), ("--plot", flags.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise StartupError(f"{flag}: {path.parent}: no such folder")
        if path is not None and path.is_dir():
            raise StartupError(f"{flag}: {path} is a folder")
        if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise StartupError(f"{flag}: {path} cannot be written")
    if flags.plot is None:
        return
    if flags.plot.suffix not in (".png", ".svg", ".pdf"):
        raise StartupError(f"--plot: {flags.plot} is not supported (.png, .svg, .pdf)")
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("--plot: matplotlib is missing (pip install 'quire[plot]')")


def write_report(flags: argparse.Namespace, record: dict[str, Any], figure: Figure) -> None:
    """Write the record to `--out` and the figure to `--plot`, if given. Raises StartupError."""
    if flags.out:
        record = {"date": datetime.now(UTC).date().isoformat(), "commit": _commit(), **record}
        try:
            flags.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise StartupError(f"--out: {flags.out} cannot be written: {error.strerror}") from None
    if flags.plot:
        command = python_script("plot", str(flags.plot))
        drawn = subprocess.run(command, input=json.dumps(figure), text=True, env=script_environment(), check=False)
        if drawn.returncode:
            raise StartupError(f"--plot: {flags.plot} could not be drawn")


def run_script(main: Callable[[], None]) -> None:
    """Run a bench that is a module of its own, with `quire`'s exit statuses."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (StartupError, ModelError) as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        sys.exit(2)


def python_script(module: str, *arguments: str, package: str = PACKAGE) -> list[str]:
    return [sys.executable, "-P", "-m", f"{package}.{module}", *arguments]


def script_environment() -> dict[str, str]:
    """Return the environment with this checkout first in PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": python_path(os.environ)}


def _commit() -> str | None:
    ask = ["git", "-C", str(IMPORT_ROOT), "-c", "safe.directory=*", "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
    except OSError:  # git is missing
        return None
    return answer.stdout.strip() or None
