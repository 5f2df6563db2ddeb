"""`quire key`: makes an API key and the line that lets it in."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from service.errors import StartupError
from service.gateway.http.auth import line_of, make_key, read_keys


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="whose key it is; several keys may have one name")
    parser.add_argument("--tenant", metavar="NAME", help="whose share its requests use; without it NAME")
    parser.add_argument("--max-open", type=int, metavar="N", help="requests at once; without it --max-open-per-key")
    parser.add_argument("--file", type=Path, metavar="FILE", help="append the line to this --api-key-file")


def run_key(flags: argparse.Namespace) -> int:
    """With --file the key alone goes to stdout, else the key and its line. The key itself is kept nowhere."""
    key = make_key()
    try:
        line = line_of(key, flags.name, flags.tenant, flags.max_open)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if flags.file is None:
        print(f"{key}\n{line}")
        return 0
    _append(flags.file, line)
    print(key)
    return 0


def _append(path: Path, line: str) -> None:
    """A new file is for its owner alone. Raises StartupError, for a file that holds anything but keys too."""
    if path.exists():
        read_keys(path)
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+") as file:
            text = file.read()
            file.write((b"" if text.endswith(b"\n") or not text else b"\n") + line.encode() + b"\n")
    except OSError as error:
        raise StartupError(f"--file: {path} cannot be written: {error.strerror}") from None
