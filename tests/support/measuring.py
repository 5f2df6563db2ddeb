"""What a measurement that is a program of its own has around it: flags, a Redis, and its figures told."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.queue.embedded.redis import EmbeddedRedis


def flags(description: str) -> argparse.ArgumentParser:
    """A parser that knows `--out`, which is for `tell`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


@contextmanager
def fresh_redis() -> Iterator[tuple[str, Path]]:
    """The URL of a Redis of its own, and an empty folder; both are gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis.start(Path(folder) / "redis")
        try:
            yield server.url, Path(folder)
        finally:
            server.stop()


def report(figures: Mapping[str, Any], out: Path | None) -> None:
    print(json.dumps(figures))
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
