"""Frame of a measuring program: flags, a Redis, output of its figures."""

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
    """Return a parser with `--out`, which `report` reads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


@contextmanager
def fresh_redis() -> Iterator[tuple[str, Path]]:
    """Yield the URL of a new Redis and an empty folder, both temporary."""
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
